#!/bin/sh
sed -i 's|nge(pib - 1)|nge(pib + 1)|' sol.py
