#!/bin/sh
sed -i 's|nge(ik)|nge(ik + 1)|' sol.py
