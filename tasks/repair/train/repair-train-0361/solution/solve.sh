#!/bin/sh
sed -i 's|nge(set + 1)|nge(set)|' sol.py
