from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest

from hpcrl.devcluster.procs import end, identify, load_identity, namespace, run_tool, snapshot, spawn
from hpcrl.errors import EnvironmentFault

ENV = {"PATH": os.environ["PATH"]}


def test_spawn_and_end_leave_no_zombie(tmp_path: Path) -> None:
    process = spawn(["sleep", "60"], log=tmp_path / "log", env=ENV)
    assert process.alive()
    end([process], grace_s=5)
    assert not process.alive()
    assert identify(process.pid) is None


def test_end_kills_what_ignores_sigterm(tmp_path: Path) -> None:
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"
    )
    process = spawn(["python3", "-c", script], log=tmp_path / "log", env=ENV)
    while "on" not in (tmp_path / "log").read_text():
        assert process.alive()
    end([process], grace_s=0.05)
    assert not process.alive()


def test_a_recycled_pid_is_neither_alive_nor_killed() -> None:
    mine = identify(os.getpid())
    assert mine is not None and mine.alive()
    for other in (dataclasses.replace(mine, start=mine.start + 1), dataclasses.replace(mine, boot="other")):
        assert not other.alive()
        end([other], grace_s=0)  # would end the test run


def test_identity_survives_a_file(tmp_path: Path) -> None:
    mine = identify(os.getpid())
    assert mine is not None
    (tmp_path / "id").write_text(mine.dump())
    assert load_identity(tmp_path / "id") == mine


@pytest.mark.parametrize("text", ["", "12", "a b c", "1 2 3 4"])
def test_damaged_identity_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "id").write_text(text)
    assert load_identity(tmp_path / "id") is None
    assert load_identity(tmp_path / "absent") is None


def test_snapshot_finds_this_process_and_its_namespaces() -> None:
    mine = next(proc for proc in snapshot() if proc.pid == os.getpid())
    assert mine.ppid == os.getppid()
    assert mine.net == namespace(os.getpid(), "net")


def test_odd_process_names_are_parsed(tmp_path: Path) -> None:
    odd = tmp_path / "a) (b c"
    odd.symlink_to("/bin/sleep")
    process = spawn([str(odd), "60"], log=tmp_path / "log", env=ENV)
    try:
        names = [proc.comm for proc in snapshot() if proc.pid == process.pid]
        assert names in (["a) (b c"], ["sleep"])
    finally:
        os.kill(process.pid, signal.SIGKILL)
        end([process], grace_s=1)


def test_run_tool_reports_command_and_last_line() -> None:
    assert run_tool(["cat"], stdin="hello") == "hello"
    with pytest.raises(EnvironmentFault, match=r"^sh -c .*: no such thing$"):
        run_tool(["sh", "-c", "echo first >&2; echo no such thing >&2; exit 3"])
    with pytest.raises(EnvironmentFault, match="absent-command: command not found"):
        run_tool(["absent-command"])
