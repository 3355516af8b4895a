"""Files without end, each of them empty; directories inside directories."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.errors import PolicyError
from hpcrl.sandbox.limits import Limits


@pytest.mark.parametrize(
    "command",
    [
        "i=0; while :; do i=$((i+1)); : > f$i; done",
        "cd /dev/shm; i=0; while :; do i=$((i+1)); : > f$i; done",
        "cd /tmp; i=0; while :; do i=$((i+1)); : > f$i; done",
        "cd /var/tmp; i=0; while :; do i=$((i+1)); : > f$i; done",
        "i=0; while :; do i=$((i+1)); mkdir d$i; done",
        "i=0; while [ $i -lt 200 ]; do i=$((i+1)); mkdir d; cd d; done; sleep 60",
    ],
)
def test_only_that_attempt_ends(attack: Any, command: str) -> None:
    got = attack.run(command, 30, Limits(disk_entries=2000))
    assert isinstance(got, PolicyError) and got.reason == "disk_limit"
