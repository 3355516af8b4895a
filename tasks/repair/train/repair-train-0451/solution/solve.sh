#!/bin/sh
sed -i 's|1|0|' sol.py
