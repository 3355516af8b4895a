#!/bin/sh
sed -i 's|nge(rij - 1)|nge(rij + 1)|' sol.py
