#!/bin/sh
sed -i 's|nge(we)|nge(we - 1)|' sol.py
