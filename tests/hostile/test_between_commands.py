"""What a command leaves running goes on while the model thinks: nothing waits for the next command to look."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.sandbox.limits import Limits

FILL = "i=0; while :; do i=$((i+1)); head -c 500000 /dev/zero > f$i; sleep 0.01; done"
HOG = "python3 -c 'import time; x = bytearray(60_000_000); time.sleep(60)'"


@pytest.mark.parametrize(
    ("command", "reason"),
    [(FILL, "disk_limit"), (f"{HOG} & {HOG} & {HOG} & {HOG}", "memory_limit"), ("sleep 60", None)],
)
def test_only_that_attempt_ends(attack: Any, command: str, reason: str | None) -> None:
    limits = Limits(disk_bytes=8 << 20, memory_bytes=160 << 20)
    died = attack.left_behind(f"({command}) >/dev/null 2>&1 &", 3.5, limits)
    assert (died.reason if died else None) == reason


def test_a_command_that_has_ended_is_looked_at_too(attack: Any) -> None:
    died = attack.left_behind("head -c 20000000 /dev/zero > big", 2.5, Limits(disk_bytes=8 << 20))
    assert died is not None and died.reason == "disk_limit"
