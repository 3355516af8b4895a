#!/bin/sh
sed -i 's|sum|max|' sol.py
