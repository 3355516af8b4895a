#!/bin/sh
sed -i 's|nge(hi - 1)|nge(hi + 1)|' sol.py
