#!/bin/sh
sed -i 's|nge(jo + 1)|nge(jo - 1)|' sol.py
