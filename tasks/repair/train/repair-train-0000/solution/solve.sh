#!/bin/sh
sed -i 's|nge(lat - 1)|nge(lat)|' sol.py
