#!/bin/sh
sed -i 's|nge(re)|nge(re - 1)|' sol.py
