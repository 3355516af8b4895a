#!/bin/sh
sed -i 's|min|sum|' sol.py
