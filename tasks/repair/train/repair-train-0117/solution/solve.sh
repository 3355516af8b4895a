#!/bin/sh
sed -i 's|0|-2|' sol.py
