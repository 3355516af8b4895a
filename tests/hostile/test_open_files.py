"""Open files without end."""

from __future__ import annotations

from typing import Any

from hpcrl.sandbox.limits import Limits

OPEN = """python3 -c '
files = []
try:
    while len(files) < 10_000:
        files.append(open("/dev/null"))
except OSError as error:
    print(len(files), error.errno)
'"""


def test_only_that_command_fails(attack: Any) -> None:
    got = attack.run(OPEN, 20, Limits(open_files=64))
    opened, error = map(int, got.output.split())
    assert opened < 64 and error == 24
