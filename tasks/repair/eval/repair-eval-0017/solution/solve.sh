#!/bin/sh
sed -i 's|sorted|min|' sol.py
