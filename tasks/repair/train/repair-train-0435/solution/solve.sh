#!/bin/sh
sed -i 's|nge(doz)|nge(doz + 1)|' sol.py
