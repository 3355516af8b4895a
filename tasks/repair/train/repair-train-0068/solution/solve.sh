#!/bin/sh
sed -i 's|nge(ja)|nge(ja + 1)|' sol.py
