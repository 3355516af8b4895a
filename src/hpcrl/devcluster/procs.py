"""Processes: identity that survives pid reuse, namespace membership, starting and ending.

A pid alone is never trusted: a process is (pid, start time, boot), or a member of a namespace that the cluster owns.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcrl.errors import EnvironmentFault

_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessId:
    """One process for ever: pid, start time (clock ticks after boot), boot id."""

    pid: int
    start: int
    boot: str

    def alive(self) -> bool:
        """True while this very process runs; a zombie is dead."""
        _reap(self.pid)
        stat = _stat(self.pid)
        return stat is not None and stat.start == self.start and stat.state != "Z" and self.boot == _boot_id()

    def dump(self) -> str:
        return f"{self.pid} {self.start} {self.boot}\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Proc:
    """A line of the process table; ``net`` and ``pid_ns`` are namespace inodes."""

    pid: int
    ppid: int
    comm: str
    net: int
    pid_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stat:
    comm: str
    state: str
    ppid: int
    start: int


def run_tool(argv: Sequence[str], *, env: dict[str, str] | None = None, stdin: str = "") -> str:
    """Standard output of a short command. Raises EnvironmentFault with the command and its last error line."""
    try:
        done = subprocess.run(argv, env=env, input=stdin, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError as error:
        raise EnvironmentFault(f"{argv[0]}: command not found") from error
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault(f"{' '.join(argv)}: no answer within 60 s") from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise EnvironmentFault(f"{' '.join(argv)}: {lines[-1] if lines else f'exit code {done.returncode}'}")
    return done.stdout


def spawn(argv: Sequence[str], *, log: Path, env: dict[str, str]) -> ProcessId:
    """Start a daemon in its own session, with output appended to ``log``. It outlives this process."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    try:
        # Not subprocess.Popen: nobody here waits for the child, and Popen objects complain about that.
        pid = os.posix_spawnp(argv[0], list(argv), env, file_actions=actions, setsid=True)
    except FileNotFoundError as error:
        raise EnvironmentFault(f"{argv[0]}: command not found") from error
    found = identify(pid)
    if found is None:
        raise EnvironmentFault(f"{argv[0]} ended at once; see {log}")
    return found


def identify(pid: int) -> ProcessId | None:
    """The process that has ``pid`` now, or None."""
    stat = _stat(pid)
    return None if stat is None else ProcessId(pid=pid, start=stat.start, boot=_boot_id())


def load_identity(path: Path) -> ProcessId | None:
    """What ``ProcessId.dump`` wrote to ``path``; None when there is no such file or it is damaged."""
    try:
        pid, start, boot = path.read_text(encoding="ascii").split()
        return ProcessId(pid=int(pid), start=int(start), boot=boot)
    except (OSError, ValueError):
        return None


def snapshot() -> list[Proc]:
    """All living processes whose namespaces can be read."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        stat = _stat(pid)
        if stat is None or stat.state == "Z":
            continue
        with suppress(OSError):  # it ended meanwhile
            net, pid_ns = namespace(pid, "net"), namespace(pid, "pid")
            found.append(Proc(pid=pid, ppid=stat.ppid, comm=stat.comm, net=net, pid_ns=pid_ns))
    return found


def namespace(pid: int, kind: str) -> int:
    """Inode of a namespace of a process; ``kind`` as in /proc/PID/ns. Raises OSError when it is gone."""
    return os.stat(f"/proc/{pid}/ns/{kind}").st_ino


def end(processes: Iterable[ProcessId], *, grace_s: float) -> None:
    """SIGTERM, up to ``grace_s`` seconds of patience, SIGKILL, and wait until they are gone."""
    waiting = [process for process in processes if process.alive()]
    for number, patience in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        for process in waiting:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)
        waiting = _await_end(waiting, timeout_s=patience)
    if waiting:
        raise EnvironmentFault(f"processes that cannot be killed: {', '.join(str(p.pid) for p in waiting)}")


def _await_end(processes: list[ProcessId], *, timeout_s: float) -> list[ProcessId]:
    """Those still alive after ``timeout_s``, or none as soon as all have ended."""
    wait_for(lambda: not any(process.alive() for process in processes), timeout_s=timeout_s)
    return [process for process in processes if process.alive()]


def wait_for(condition: Callable[[], bool], *, timeout_s: float, poll_s: float = _POLL_S) -> bool:
    """Poll until ``condition()``; False when ``timeout_s`` passed first."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(poll_s)
    return True


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name may hold spaces and brackets: the fields start after the last ')'.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return _Stat(comm=head.partition("(")[2], state=fields[0], ppid=int(fields[1]), start=int(fields[19]))


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _reap(pid: int) -> None:
    """Take the exit status if it is our own child, so that a daemon started by this process leaves no zombie."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
