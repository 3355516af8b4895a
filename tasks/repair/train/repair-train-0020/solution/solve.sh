#!/bin/sh
sed -i 's|nge(le)|nge(le - 1)|' sol.py
