#!/bin/sh
sed -i 's|nge(rak)|nge(rak + 1)|' sol.py
