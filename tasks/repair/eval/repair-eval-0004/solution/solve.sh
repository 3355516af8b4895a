#!/bin/sh
sed -i 's|nge(wop - 1)|nge(wop + 1)|' sol.py
