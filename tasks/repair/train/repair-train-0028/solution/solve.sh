#!/bin/sh
sed -i 's|min|len|' sol.py
