"""Processes of a sandbox, seen from the host through /proc."""

from __future__ import annotations

import os
import signal
from pathlib import Path

__all__ = ["children", "descendants", "kill_all", "reaped_faults", "resident_bytes"]

_PAGE = os.sysconf("SC_PAGE_SIZE")


def children(pid: int) -> list[int]:
    """Direct children of all threads of ``pid``; empty when it is gone."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split())
    except OSError:
        pass
    return found


def descendants(pid: int, limit: int = 10_000) -> list[int]:
    """``pid``'s descendants, parents before children, at most about ``limit`` (a fork bomb must not keep the host busy)."""
    found: list[int] = []
    queue = children(pid)
    while queue and len(found) < limit:
        current = queue.pop()
        found.append(current)
        queue += children(current)
    return found


def kill_all(pids: list[int]) -> None:
    """SIGKILL each; those already gone are skipped."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def resident_bytes(pids: list[int]) -> int:
    """Resident anonymous memory of all (pages of files and shared memory are left out)."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/statm").read_bytes().split()
        except OSError:
            continue
        total += (int(fields[1]) - int(fields[2])) * _PAGE if len(fields) > 2 else 0
    return total


def reaped_faults(pid: int) -> int:
    """Page faults of the children that ``pid`` has waited for, since its own start; -1 when it is gone.

    A process that ran has faulted, so for a PID namespace's init an equal number means: it has adopted and reaped nothing meanwhile.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return -1
    # proc(5): cminflt and cmajflt are fields 11 and 13; the first two were cut off.
    return int(fields[8]) + int(fields[10])
