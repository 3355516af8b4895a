#!/bin/sh
sed -i 's|nge(ga - 1)|nge(ga + 1)|' sol.py
