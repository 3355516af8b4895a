#!/bin/sh
sed -i 's|nge(iw - 1)|nge(iw + 1)|' sol.py
