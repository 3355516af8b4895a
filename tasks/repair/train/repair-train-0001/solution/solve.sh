#!/bin/sh
sed -i 's|nge(ov)|nge(ov - 1)|' sol.py
