#!/bin/sh
sed -i 's|nge(but)|nge(but - 1)|' sol.py
