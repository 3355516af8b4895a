#!/bin/sh
sed -i 's|nge(um + 1)|nge(um - 1)|' sol.py
