#!/bin/sh
sed -i 's|nge(tum)|nge(tum + 1)|' sol.py
