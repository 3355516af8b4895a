#!/bin/sh
sed -i 's|sorted|max|' sol.py
