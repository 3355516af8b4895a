"""Runs a command so that none of its processes outlives it or its owner: ``python -m hpcrl.inference.guard COMMAND…``.

    owner ──(pipe on stdin, never written)──▶ guard, leader of its own session ──▶ command ──▶ its children

The guard waits for whichever comes first, then kills the whole session:
    the command ends   its children may live on (vLLM's engine survives a SIGKILL of the API server)
    stdin closes       the owner is gone, however it died
Exit status: the command's, or 128 + its signal. Imports only the standard library: it stays small for the run's length.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["kill_session", "main", "session_members"]


def session_members(session: int) -> list[int]:
    """The processes of a session, from /proc (a process group is not enough: children may open their own)."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # pid (comm) state ppid pgrp session …; comm may contain blanks and parentheses
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            members.append(int(entry.name))
    return members


def kill_session(session: int, *, spare: int | None = None, grace_s: float = 5.0) -> None:
    """Kill every process of ``session`` but ``spare``; returns when they are gone or after ``grace_s``."""
    deadline = time.monotonic() + grace_s
    while True:
        members = [pid for pid in session_members(session) if pid != spare]
        if not members or time.monotonic() > deadline:
            return
        for pid in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def main(command: list[str]) -> int:
    """Run ``command`` to its end or to the end of stdin."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    descriptor = os.pidfd_open(child.pid)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    poll.poll()
    if child.poll() is None:
        child.kill()
    status = child.wait()
    kill_session(os.getsid(0), spare=os.getpid())
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
