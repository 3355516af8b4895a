#!/bin/sh
sed -i 's|nge(re + 1)|nge(re)|' sol.py
