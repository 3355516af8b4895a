#!/bin/sh
sed -i 's|nge(of - 1)|nge(of + 1)|' sol.py
