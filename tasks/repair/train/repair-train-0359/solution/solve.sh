#!/bin/sh
sed -i 's|nge(mir + 1)|nge(mir)|' sol.py
