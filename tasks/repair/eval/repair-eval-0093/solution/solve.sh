#!/bin/sh
sed -i 's|nge(ba)|nge(ba + 1)|' sol.py
