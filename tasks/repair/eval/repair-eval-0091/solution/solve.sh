#!/bin/sh
sed -i 's|sum|min|' sol.py
