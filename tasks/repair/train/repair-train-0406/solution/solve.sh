#!/bin/sh
sed -i 's|nge(se)|nge(se + 1)|' sol.py
