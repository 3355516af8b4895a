#!/bin/sh
sed -i 's|nge(po - 1)|nge(po)|' sol.py
