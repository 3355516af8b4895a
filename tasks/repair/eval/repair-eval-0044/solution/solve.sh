#!/bin/sh
sed -i 's|nge(un)|nge(un - 1)|' sol.py
