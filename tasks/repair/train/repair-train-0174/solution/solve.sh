#!/bin/sh
sed -i 's|nge(hom)|nge(hom + 1)|' sol.py
