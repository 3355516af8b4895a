from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.errors import PolicyError
from hpcrl.sandbox import workdir
from hpcrl.sandbox.base import Mount, SandboxSpec
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.workdir import WorkDir


@pytest.fixture
def work(tmp_path: Path) -> Iterator[WorkDir]:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "sol.py").write_text("print(0)\n")
    spec = SandboxSpec(image=None, files=(tmp_path / "files",), mounts=(Mount(target="/logs", writable=True),))
    directory = WorkDir(tmp_path / "attempt", "/work", None)
    directory.create(spec)
    directory.add_attempt(spec)
    yield directory
    directory.remove()


def names(artifact: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(artifact)) as archive:
        return [member.name for member in archive.getmembers()]


@pytest.mark.parametrize(("content", "found"), [("print(1)\n", [".", "sol.py"]), ("print(0)\n", ["."])])
def test_a_change_within_one_tick_of_the_clock_is_found(work: WorkDir, content: str, found: list[str]) -> None:
    file = work.work / "sol.py"
    file.write_text(content)
    # As a clock of coarse steps has it: written again, with the times it had before.
    work._original["sol.py"] = workdir._Original(os.stat(file), work._original["sol.py"].source)
    assert names(work.artifact(1 << 20)) == found


def test_what_its_owner_could_write(work: WorkDir) -> None:
    logs = work.mount(0)
    assert not work.locked(0, ("reward.txt", "reward.json"))
    (logs / "reward.txt").write_text("1")
    (logs / "output.txt").write_text("")
    (logs / "output.txt").chmod(0o444)
    assert not work.locked(0, ("reward.txt", "reward.json"))
    (logs / "reward.txt").chmod(0o444)
    assert work.locked(0, ("reward.txt", "reward.json"))
    (logs / "reward.txt").chmod(0o644)
    logs.chmod(0o555)
    assert work.locked(0, ("reward.txt", "reward.json"))
    logs.chmod(0o755)


def test_what_no_directory_shows_is_counted_too(work: WorkDir) -> None:
    work.check_usage(Limits(disk_bytes=1 << 20), unnamed=1 << 19)
    with pytest.raises(PolicyError, match="disk_limit"):
        work.check_usage(Limits(disk_bytes=1 << 20), unnamed=(1 << 20) + 1)
