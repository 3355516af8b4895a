#!/bin/sh
sed -i 's|nge(big)|nge(big - 1)|' sol.py
