#!/bin/sh
sed -i 's|nge(pez + 1)|nge(pez - 1)|' sol.py
