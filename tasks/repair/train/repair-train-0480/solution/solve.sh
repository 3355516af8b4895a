#!/bin/sh
sed -i 's|sorted|len|' sol.py
