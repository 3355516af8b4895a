#!/bin/sh
sed -i 's|nge(kih - 1)|nge(kih)|' sol.py
