#!/bin/sh
sed -i 's|nge(su)|nge(su + 1)|' sol.py
