#!/bin/sh
sed -i 's|nge(im - 1)|nge(im + 1)|' sol.py
