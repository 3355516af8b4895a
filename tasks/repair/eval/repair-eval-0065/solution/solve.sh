#!/bin/sh
sed -i 's|<=|==|' sol.py
