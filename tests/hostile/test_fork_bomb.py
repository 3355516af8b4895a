"""A fork bomb."""

from __future__ import annotations

import time
from typing import Any

from hpcrl.sandbox.limits import Limits


def test_it_ends_by_its_deadline(attack: Any) -> None:
    began = time.monotonic()
    attack.run("b() { b | b & }; b; sleep 60", 2, Limits(processes=32))
    assert time.monotonic() - began < 30
