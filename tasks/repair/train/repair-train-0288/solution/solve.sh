#!/bin/sh
sed -i 's|nge(luv + 1)|nge(luv)|' sol.py
