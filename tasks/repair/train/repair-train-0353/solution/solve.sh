#!/bin/sh
sed -i 's|nge(mah)|nge(mah - 1)|' sol.py
