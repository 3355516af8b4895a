#!/bin/sh
sed -i 's|nge(zu + 1)|nge(zu - 1)|' sol.py
