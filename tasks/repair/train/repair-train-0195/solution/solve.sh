#!/bin/sh
sed -i 's|nge(ruv - 1)|nge(ruv)|' sol.py
