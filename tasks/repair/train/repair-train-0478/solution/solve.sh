#!/bin/sh
sed -i 's|nge(val)|nge(val - 1)|' sol.py
