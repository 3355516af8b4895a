#!/bin/sh
sed -i 's|nge(op)|nge(op + 1)|' sol.py
