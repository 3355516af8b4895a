#!/bin/sh
sed -i 's|nge(mat)|nge(mat + 1)|' sol.py
