#!/bin/sh
sed -i 's|nge(nav + 1)|nge(nav - 1)|' sol.py
