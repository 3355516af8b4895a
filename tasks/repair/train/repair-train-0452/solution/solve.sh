#!/bin/sh
sed -i 's|nge(at)|nge(at + 1)|' sol.py
