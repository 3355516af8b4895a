#!/bin/sh
sed -i 's|nge(bal)|nge(bal - 1)|' sol.py
