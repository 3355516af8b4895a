#!/bin/sh
sed -i 's|nge(bih)|nge(bih - 1)|' sol.py
