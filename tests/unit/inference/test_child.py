from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hpcrl.inference.child import Child, last_lines, socket_folder
from hpcrl.inference.guard import session_members

# A parent with a child of its own that ignores SIGTERM; both wait for ever.
STUBBORN = ["sh", "-c", "trap '' TERM; (trap '' TERM; while :; do sleep 1; done) & echo up; wait"]


async def until(condition: object, log: Path) -> None:
    while "up" not in log.read_text():
        await asyncio.sleep(0.01)


def test_a_killed_command_takes_its_children_with_it(tmp_path: Path) -> None:
    async def run() -> None:
        child = await Child.start(STUBBORN, os.environ, tmp_path / "log")
        await until(None, child.log)
        members = session_members(child.pid)
        assert len(members) >= 3  # guard, shell, its child
        shell = min(pid for pid in members if pid != child.pid)
        os.kill(shell, signal.SIGKILL)
        assert await asyncio.wait_for(child.wait(), 10) == 128 + signal.SIGKILL
        assert session_members(child.pid) == []

    asyncio.run(run())


def test_a_killed_guard_is_noticed_and_stop_reaps_the_rest(tmp_path: Path) -> None:
    async def run() -> None:
        child = await Child.start(STUBBORN, os.environ, tmp_path / "log")
        await until(None, child.log)
        os.kill(child.pid, signal.SIGKILL)
        assert await asyncio.wait_for(child.wait(), 10) == -signal.SIGKILL
        assert session_members(child.pid)
        await child.stop()
        assert session_members(child.pid) == []

    asyncio.run(run())


def test_nothing_outlives_a_killed_owner(tmp_path: Path) -> None:
    log = tmp_path / "log"
    owner = (
        "import asyncio, os, sys; from pathlib import Path; from hpcrl.inference.child import Child\n"
        f"async def main():\n    child = await Child.start({STUBBORN!r}, os.environ, Path({str(log)!r}))\n"
        "    print(child.pid, flush=True)\n    await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    process = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    session = int(process.stdout.readline())
    while not log.exists() or "up" not in log.read_text():
        time.sleep(0.01)
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 10
    while session_members(session) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert session_members(session) == []


def test_exit_status_and_log_end(tmp_path: Path) -> None:
    async def run() -> None:
        command = ["sh", "-c", "for i in 1 2 3; do echo line $i; done; exit 7"]
        child = await Child.start(command, os.environ, tmp_path / "logs" / "log")
        assert await child.wait() == 7
        assert last_lines(child.log, 2) == "line 2\nline 3"
        await child.stop()

    asyncio.run(run())
    assert last_lines(tmp_path / "absent") == ""


def test_a_socket_has_a_short_path_that_only_we_can_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("deep/" * 20)))
    with socket_folder() as name:
        assert len(f"{name}/http") < 108
        assert stat.S_IMODE(Path(name).stat().st_mode) == 0o700
    assert not Path(name).exists()
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    with socket_folder() as name:
        assert Path(name).parent == Path("/tmp")
