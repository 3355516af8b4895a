"""Which cgroup would be used, by what the kernel says of this process and by what may be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.sandbox import cgroup
from hpcrl.sandbox.cgroup import NotDelegated, SandboxCgroup, delegated
from hpcrl.sandbox.limits import Limits


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCRL_CGROUP", raising=False)


def tree(root: Path, offered: str = "cpu memory pids", enabled: str = "memory pids") -> Path:
    """A directory with the files of a cgroup that may hold others."""
    root.mkdir(parents=True, exist_ok=True)
    for name, text in (("controllers", offered), ("subtree_control", enabled), ("procs", "")):
        (root / f"cgroup.{name}").write_text(text)
    return root


def mounts(root: Path, top: str = "/") -> str:
    return f"24 1 0:22 / /proc rw - proc proc rw\n30 1 0:26 {top} {root} rw,nosuid - cgroup2 cgroup2 rw\n"


def test_beside_the_processes_own(tmp_path: Path) -> None:
    job = tree(tmp_path / "job")
    assert delegated("0::/job/roles\n", mounts(tmp_path)) == job
    assert delegated("4:memory:/x\n0::/job/roles\n", mounts(tmp_path)) == job


def test_in_the_root_of_a_container(tmp_path: Path) -> None:
    assert delegated("0::/\n", mounts(tree(tmp_path))) == tmp_path
    assert delegated("0::/outer/roles\n", mounts(tree(tmp_path), "/outer")) == tmp_path


def test_a_given_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCRL_CGROUP", str(tree(tmp_path)))
    assert delegated("", "") == tmp_path


def test_controllers_are_enabled(tmp_path: Path) -> None:
    delegated("0::/\n", mounts(tree(tmp_path, enabled="cpu")))
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory +pids"


@pytest.mark.parametrize(
    ("own", "offered", "mounted", "why"),
    [
        ("0::/\n", "memory pids", False, "no cgroup2 file system is mounted"),
        ("4:memory:/x\n", "memory pids", True, "cannot be seen"),
        ("0::/../elsewhere\n", "memory pids", True, "cannot be seen"),
        ("0::/\n", "cpu io pids", True, "lacks the controller memory"),
        ("0::/\n", "", True, "lacks the controller memory and pids"),
        ("0::/nowhere/roles\n", "memory pids", True, "is no cgroup"),
    ],
)
def test_none(tmp_path: Path, own: str, offered: str, mounted: bool, why: str) -> None:
    tree(tmp_path, offered)
    with pytest.raises(NotDelegated, match=why):
        delegated(own, mounts(tmp_path) if mounted else "")


def test_one_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup.os, "access", lambda path, mode: False)
    with pytest.raises(NotDelegated, match="may not be written"):
        delegated("0::/\n", mounts(tree(tmp_path)))


def test_limits_and_cause(tmp_path: Path) -> None:
    group = SandboxCgroup(tmp_path, Path("/scratch/w-1/attempt-2"))
    group.create(Limits(memory_bytes=100 << 20, processes=10))
    assert group.path == tmp_path / "hpcrl-w-1-attempt-2"
    assert int((group.path / "memory.max").read_text()) == 116 << 20
    assert (group.path / "memory.oom.group").read_text() == "1"
    assert int((group.path / "pids.max").read_text()) == 58
    assert group.broken_limit() is None
    (group.path / "memory.events").write_text("low 0\noom 0\noom_kill 0\n")
    assert group.broken_limit() is None
    (group.path / "memory.events").write_text("low 0\noom 1\noom_kill 3\n")
    broken = group.broken_limit()
    assert broken is not None and broken.reason == "memory_limit"
