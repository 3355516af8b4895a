#!/bin/sh
sed -i 's|nge(ta + 1)|nge(ta)|' sol.py
