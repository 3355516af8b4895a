#!/bin/sh
sed -i 's|min|sorted|' sol.py
