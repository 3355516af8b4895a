#!/bin/sh
sed -i 's|nge(ef + 1)|nge(ef)|' sol.py
