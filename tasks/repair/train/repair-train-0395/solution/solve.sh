#!/bin/sh
sed -i 's|nge(va + 1)|nge(va - 1)|' sol.py
