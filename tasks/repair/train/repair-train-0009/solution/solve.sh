#!/bin/sh
sed -i 's|nge(lat)|nge(lat + 1)|' sol.py
