#!/bin/sh
sed -i 's|nge(ew - 1)|nge(ew + 1)|' sol.py
