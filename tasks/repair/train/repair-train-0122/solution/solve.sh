#!/bin/sh
sed -i 's|nge(ne)|nge(ne + 1)|' sol.py
