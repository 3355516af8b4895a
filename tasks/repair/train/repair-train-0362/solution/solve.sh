#!/bin/sh
sed -i 's|nge(zaj)|nge(zaj - 1)|' sol.py
