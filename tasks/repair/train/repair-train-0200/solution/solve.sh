#!/bin/sh
sed -i 's|nge(vo)|nge(vo - 1)|' sol.py
