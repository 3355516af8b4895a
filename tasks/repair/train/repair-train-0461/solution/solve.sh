#!/bin/sh
sed -i 's|nge(tad - 1)|nge(tad)|' sol.py
