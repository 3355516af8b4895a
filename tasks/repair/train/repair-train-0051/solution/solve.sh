#!/bin/sh
sed -i 's|nge(av)|nge(av + 1)|' sol.py
