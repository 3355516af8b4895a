#!/bin/sh
sed -i 's|-1|-2|' sol.py
