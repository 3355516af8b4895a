#!/bin/sh
sed -i 's|sum|len|' sol.py
