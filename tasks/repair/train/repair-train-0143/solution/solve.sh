#!/bin/sh
sed -i 's|nge(gi + 1)|nge(gi - 1)|' sol.py
