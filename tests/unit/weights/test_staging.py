from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.errors import EnvironmentFault, InfraError
from hpcrl.weights import staging as module
from hpcrl.weights.staging import Staging, remove_leftovers


def test_swap_and_reuse(tmp_path: Path) -> None:
    with Staging("run/1", "r0", tmp_path) as staging:
        first, second = staging.paths
        assert staging.standby_path == first
        staging.standby(5)[:] = b"hello"
        staging.flipped({0})
        assert staging.standby_path == second
        staging.standby(3)[:] = b"new"
        assert first.read_bytes() == b"hello"
        inode = first.stat().st_ino
        staging.flipped(set())
        assert staging.standby_path == second
        staging.flipped({0})
        assert bytes(staging.standby(5)) == b"hello"
        assert first.stat().st_ino == inode and second.read_bytes() == b"new"
        assert len(staging.standby(0)) == 0
        assert len(staging.standby(9)) == 9
        assert "run_1-r0" in first.name
    assert list(tmp_path.iterdir()) == []


def test_a_copy_that_a_replica_holds_is_never_the_standby(tmp_path: Path) -> None:
    with Staging("run", "r0", tmp_path) as staging:

        def version(content: bytes, flipped: set[int]) -> Path:
            staging.standby(len(content))[:] = content
            path = staging.standby_path
            staging.flipped(flipped)
            return path

        common = version(b"0", {1, 2, 3})
        second = version(b"1", {2, 3})
        third = version(b"2", {3})  # 1 stayed on the first, 2 on the second
        assert (common.read_bytes(), second.read_bytes(), third.read_bytes()) == (b"0", b"1", b"2")
        assert len(set(staging.paths)) == len(list(tmp_path.iterdir())) == 4
        fourth = version(b"3", {1, 3})
        assert (second.read_bytes(), fourth.read_bytes()) == (b"1", b"3")
        assert len(staging.paths) == 3
        last = version(b"4", {1, 2, 3})
        assert last.read_bytes() == b"4"
        assert len(staging.paths) == len(list(tmp_path.iterdir())) == 2
        assert staging.standby_path != last
    assert list(tmp_path.iterdir()) == []


def test_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with Staging("run", "r0", tmp_path) as staging:
            assert [stat.S_IMODE(path.stat().st_mode) for path in staging.paths] == [0o600, 0o600]
    finally:
        os.umask(old)


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib; from hpcrl.weights.staging import Staging;"
        "s = Staging('dead', 'r0', pathlib.Path(sys.argv[1])); s.standby(4)[:] = b'gone'; os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    dead = sorted(tmp_path.glob("hpcrl-dead-*"))
    assert len(dead) == 2
    (tmp_path / "hpcrl-notours.txt").write_text("")
    with Staging("alive", "r0", tmp_path) as staging:
        assert not any(path.exists() for path in dead)
        assert remove_leftovers(tmp_path) == []
        assert all(path.exists() for path in staging.paths) and (tmp_path / "hpcrl-notours.txt").exists()
        with pytest.raises(EnvironmentFault, match="still running"):
            Staging("alive", "r0", tmp_path)
        assert all(path.exists() for path in staging.paths)


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with Staging("run", "r0", tmp_path) as staging:
        with monkeypatch.context() as patch:
            patch.setattr(module.os, "posix_fallocate", full)
            with pytest.raises(
                InfraError, match=r"staging_full: .* MiB left, no room for 1 MiB of weights: a node needs two"
            ):
                staging.standby(10)
        staging.standby(10)[:] = bytes(10)


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="does not exist"):
        Staging("run", "r0", tmp_path / "none")


def test_symlink_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("keep")
    (tmp_path / "hpcrl-run-r0-0.weights").symlink_to(target)
    with pytest.raises(EnvironmentFault):
        Staging("run", "r0", tmp_path)
    assert target.read_text() == "keep"
