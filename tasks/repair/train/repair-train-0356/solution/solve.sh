#!/bin/sh
sed -i 's|nge(da - 1)|nge(da)|' sol.py
