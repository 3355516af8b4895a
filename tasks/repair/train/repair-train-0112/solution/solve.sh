#!/bin/sh
sed -i 's|nge(aj + 1)|nge(aj)|' sol.py
