#!/bin/sh
sed -i 's|max|sorted|' sol.py
