#!/bin/sh
sed -i 's|sum|sorted|' sol.py
