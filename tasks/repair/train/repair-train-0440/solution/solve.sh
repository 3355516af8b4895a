#!/bin/sh
sed -i 's|nge(puf - 1)|nge(puf + 1)|' sol.py
