#!/bin/sh
sed -i 's|nge(puk + 1)|nge(puk - 1)|' sol.py
