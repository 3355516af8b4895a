#!/bin/sh
sed -i 's|-2|1|' sol.py
