#!/bin/sh
sed -i 's|nge(az)|nge(az + 1)|' sol.py
