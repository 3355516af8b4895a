"""A command that ignores what can be ignored, while a child in a session of its own holds the output open."""

from __future__ import annotations

from typing import Any


def test_it_ends_by_its_deadline(attack: Any) -> None:
    got = attack.run("setsid sleep 300 & trap '' TERM INT HUP QUIT; while :; do sleep 0.01; done", 0.5)
    assert got.timed_out and got.duration_s < 3
