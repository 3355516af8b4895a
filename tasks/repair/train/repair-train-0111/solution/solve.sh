#!/bin/sh
sed -i 's|nge(ud - 1)|nge(ud + 1)|' sol.py
