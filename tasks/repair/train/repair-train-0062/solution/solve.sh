#!/bin/sh
sed -i 's|len|sorted|' sol.py
