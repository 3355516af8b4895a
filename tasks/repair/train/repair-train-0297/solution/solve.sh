#!/bin/sh
sed -i 's|nge(ku)|nge(ku + 1)|' sol.py
