#!/bin/sh
sed -i 's|len|min|' sol.py
