#!/bin/sh
sed -i 's|nge(ma - 1)|nge(ma + 1)|' sol.py
