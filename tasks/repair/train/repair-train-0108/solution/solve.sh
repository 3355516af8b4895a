#!/bin/sh
sed -i 's|len|sum|' sol.py
