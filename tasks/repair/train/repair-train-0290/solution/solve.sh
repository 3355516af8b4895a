#!/bin/sh
sed -i 's|nge(vup + 1)|nge(vup)|' sol.py
