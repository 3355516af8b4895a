#!/bin/sh
sed -i 's|max|len|' sol.py
