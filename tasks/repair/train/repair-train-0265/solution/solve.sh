#!/bin/sh
sed -i 's|nge(hub + 1)|nge(hub)|' sol.py
