#!/bin/sh
sed -i 's|nge(jap + 1)|nge(jap - 1)|' sol.py
