"""Commands that no system call can take: half of a surrogate pair, as JSON can spell it; a NUL."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("command", ["echo \ud800", "echo \0"])
def test_only_that_command_fails(attack: Any, command: str) -> None:
    assert attack.run(command).exit_code == 126
