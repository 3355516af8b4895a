#!/bin/sh
sed -i 's|len|max|' sol.py
