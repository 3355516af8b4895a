"""Files without end in each place that can be written."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.errors import PolicyError
from hpcrl.sandbox.limits import Limits


@pytest.mark.parametrize("where", [".", "/dev/shm"])
def test_only_that_attempt_ends(attack: Any, where: str) -> None:
    fill = f"cd {where}; i=0; while :; do i=$((i+1)); head -c 500000 /dev/zero > f$i; sleep 0.01; done"
    got = attack.run(fill, 30, Limits(disk_bytes=8 << 20))
    assert isinstance(got, PolicyError) and got.reason == "disk_limit"


@pytest.mark.parametrize("where", ["/tmp", "/var/tmp"])
def test_memory_backed_places_are_bounded(attack: Any, where: str) -> None:
    got = attack.run(f"head -c 200000000 /dev/zero > {where}/big; stat -c %s {where}/big")
    assert int(got.output.split()[-1]) <= 64 << 20
