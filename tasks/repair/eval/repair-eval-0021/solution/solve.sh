#!/bin/sh
sed -i 's|nge(mit + 1)|nge(mit)|' sol.py
