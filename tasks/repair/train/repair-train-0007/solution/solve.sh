#!/bin/sh
sed -i 's|nge(ne + 1)|nge(ne - 1)|' sol.py
