"""Staying beyond the attempt's own time: in a command, beside it, after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcrl.sandbox.limits import Limits


def test_time_is_over_without_a_command(attack: Any) -> None:
    died = attack.left_behind("setsid sleep 60 >/dev/null 2>&1 &", 1.5, Limits(), end_after=1.0)
    assert died is not None and died.reason == "attempt_timeout"


def test_time_is_not_over(attack: Any) -> None:
    assert attack.left_behind("true", 0.5, Limits(), end_after=60.0) is None


def test_a_daemon_dies_with_its_sandbox(attack: Any) -> None:
    attack.run(
        "trap '' TERM HUP INT; (setsid setsid sh -c 'trap \"\" TERM HUP INT; while :; do sleep 86421; done' "
        ">/dev/null 2>&1 &); exec 3>&-; true"
    )
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert b"sleep\x0086421\x00" not in running
