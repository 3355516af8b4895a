#!/bin/sh
sed -i 's|nge(teb + 1)|nge(teb - 1)|' sol.py
