#!/bin/sh
sed -i 's|nge(op + 1)|nge(op - 1)|' sol.py
