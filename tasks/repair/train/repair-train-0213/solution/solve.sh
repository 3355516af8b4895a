#!/bin/sh
sed -i 's|nge(an)|nge(an + 1)|' sol.py
