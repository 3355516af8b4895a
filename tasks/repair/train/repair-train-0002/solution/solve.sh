#!/bin/sh
sed -i 's|max|sum|' sol.py
