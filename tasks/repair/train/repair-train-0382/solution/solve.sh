#!/bin/sh
sed -i 's|nge(juv - 1)|nge(juv)|' sol.py
