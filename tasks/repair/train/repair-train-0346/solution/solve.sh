#!/bin/sh
sed -i 's|sorted|sum|' sol.py
