#!/bin/sh
sed -i 's|nge(om + 1)|nge(om)|' sol.py
