#!/bin/sh
sed -i 's|nge(ni)|nge(ni + 1)|' sol.py
