#!/bin/sh
sed -i 's|nge(gep - 1)|nge(gep + 1)|' sol.py
