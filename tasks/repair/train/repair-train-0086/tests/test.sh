#!/bin/sh
exec python3 -I -S /tests/check.py /tests/cases.txt /work/sol.py /logs/verifier/reward.txt
