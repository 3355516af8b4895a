#!/bin/sh
sed -i 's|nge(iw - 1)|nge(iw)|' sol.py
