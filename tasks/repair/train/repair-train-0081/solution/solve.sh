#!/bin/sh
sed -i 's|nge(so)|nge(so - 1)|' sol.py
