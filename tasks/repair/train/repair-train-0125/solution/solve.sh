#!/bin/sh
sed -i 's|nge(vaz - 1)|nge(vaz)|' sol.py
