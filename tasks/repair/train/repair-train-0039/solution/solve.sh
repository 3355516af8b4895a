#!/bin/sh
sed -i 's|nge(az + 1)|nge(az)|' sol.py
