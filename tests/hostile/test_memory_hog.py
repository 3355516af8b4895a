"""Memory without end, in one process."""

from __future__ import annotations

from typing import Any

from hpcrl.sandbox.limits import Limits


def test_only_that_command_fails(attack: Any) -> None:
    got = attack.run("python3 -c 'x = bytearray(1 << 30)'", 20, Limits(memory_bytes=128 << 20))
    assert got.exit_code == 1 and "MemoryError" in got.output
