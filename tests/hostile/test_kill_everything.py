"""Signals to all processes that can be seen."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.errors import PolicyError


@pytest.mark.parametrize("command", ["kill -9 0", "kill -9 -1", "kill -STOP -1", "kill -9 1; kill -9 $PPID"])
def test_only_that_attempt_ends(attack: Any, command: str) -> None:
    got = attack.run(command, 3)
    assert isinstance(got, PolicyError) or got.exit_code == 137 or got.timed_out
