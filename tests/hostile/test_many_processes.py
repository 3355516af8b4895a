"""Processes without end that stay."""

from __future__ import annotations

from typing import Any

from hpcrl.sandbox.limits import Limits

FORK = """python3 -c '
import os, time
made = 0
try:
    while made < 1000:
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except OSError as error:
    print(made, error.errno)
'"""


def test_only_that_command_fails(attack: Any) -> None:
    got = attack.run(FORK, 20, Limits(processes=40))
    made, error = map(int, got.output.split())
    assert made < 40 and error == 11
