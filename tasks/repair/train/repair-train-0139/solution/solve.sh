#!/bin/sh
sed -i 's|max|min|' sol.py
