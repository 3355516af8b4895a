#!/bin/sh
sed -i 's|nge(lu - 1)|nge(lu)|' sol.py
