#!/bin/sh
sed -i 's|nge(mih - 1)|nge(mih + 1)|' sol.py
