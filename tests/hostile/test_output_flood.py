"""Gigabytes of output, not all of it text."""

from __future__ import annotations

from typing import Any

from hpcrl.sandbox.limits import Limits


def test_it_is_cut_and_flagged(attack: Any) -> None:
    got = attack.run("cat /dev/urandom", 60, Limits(output_flood_bytes=8 << 20))
    assert got.flooded and got.truncated and not got.timed_out and len(got.output) < 20_000
