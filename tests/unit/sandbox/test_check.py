"""What is not enforced is said, and refused where that was asked for."""

from __future__ import annotations

import asyncio

import pytest

from hpcrl.errors import EnvironmentFault
from hpcrl.sandbox import check
from hpcrl.sandbox.cgroup import NotDelegated
from hpcrl.sandbox.check import Gap, gaps, preflight


def test_the_process_backend_enforces_nothing() -> None:
    assert "isolates nothing" in asyncio.run(preflight(None, "process"))[0].what
    with pytest.raises(
        EnvironmentFault, match=r"limits\.strict: not enforced on .*isolates nothing.*remedy: set sandbox"
    ):
        asyncio.run(preflight(None, "process", strict=True))


def test_a_missing_cgroup_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise NotDelegated("no cgroup2 file system is mounted")

    monkeypatch.setattr(check, "delegated", none)
    found = [gap for gap in gaps() if "no cgroup2 file system" in gap.what]
    assert len(found) == 1 and not found[0].late and "docs/security.md" in found[0].remedy
    monkeypatch.setattr(check, "delegated", lambda: None)
    assert not [gap for gap in gaps() if "cgroup" in gap.what]


def test_what_is_merely_late_is_said_but_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def one(*_: object) -> list[Gap]:
        return []

    monkeypatch.setattr(check, "_try_one", one)
    monkeypatch.setattr(check, "gaps", lambda: [Gap("disk is late", "a quota", late=True)])
    assert [gap.what for gap in asyncio.run(preflight(None, strict=True))] == ["disk is late"]
    monkeypatch.setattr(
        check, "gaps", lambda: [Gap("disk is late", "a quota", late=True), Gap("x is not kept", "do y")]
    )
    with pytest.raises(EnvironmentFault) as caught:
        asyncio.run(preflight(None, strict=True))
    assert "x is not kept (remedy: do y)" in str(caught.value) and "disk" not in str(caught.value)
