#!/bin/sh
sed -i 's|nge(bom + 1)|nge(bom - 1)|' sol.py
