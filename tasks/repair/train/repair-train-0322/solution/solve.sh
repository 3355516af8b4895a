#!/bin/sh
sed -i 's|nge(gad)|nge(gad - 1)|' sol.py
