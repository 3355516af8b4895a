#!/bin/sh
sed -i 's|nge(va - 1)|nge(va)|' sol.py
