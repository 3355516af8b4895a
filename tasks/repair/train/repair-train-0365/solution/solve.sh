#!/bin/sh
sed -i 's|nge(od)|nge(od + 1)|' sol.py
