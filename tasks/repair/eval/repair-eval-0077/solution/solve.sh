#!/bin/sh
sed -i 's|nge(oh - 1)|nge(oh + 1)|' sol.py
