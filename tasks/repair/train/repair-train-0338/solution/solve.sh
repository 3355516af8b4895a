#!/bin/sh
sed -i 's|nge(gip)|nge(gip + 1)|' sol.py
