#!/bin/sh
sed -i 's|nge(nih - 1)|nge(nih)|' sol.py
