#!/bin/sh
sed -i 's|min|max|' sol.py
