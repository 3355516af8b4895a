#!/bin/sh
sed -i 's|nge(vir - 1)|nge(vir)|' sol.py
