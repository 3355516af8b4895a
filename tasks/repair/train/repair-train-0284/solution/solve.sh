#!/bin/sh
sed -i 's|nge(pit + 1)|nge(pit)|' sol.py
