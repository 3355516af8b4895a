#!/bin/sh
sed -i 's|nge(pe + 1)|nge(pe)|' sol.py
