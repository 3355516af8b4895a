"""Processes of a sandbox, seen from the host through /proc."""

from __future__ import annotations

import os
import signal
from pathlib import Path

__all__ = ["children", "descendants", "files_in_memory", "kill_all", "memory_bytes", "reaped_faults", "session"]

_PAGE = os.sysconf("SC_PAGE_SIZE")
_SHARED_WORTH_A_LOOK = 16 << 20
"""Libraries are shared pages too; telling them apart costs a walk through the page tables."""


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


def session(leader: int) -> list[int]:
    """The processes of a session, also those that nobody's descendant list shows since their parents have ended."""
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.getsid(int(name)) == leader:
                found.append(int(name))
        except OSError:
            continue
    return found


def kill_all(pids: list[int]) -> None:
    """SIGKILL each; those already gone are skipped."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def memory_bytes(pids: list[int]) -> int:
    """Memory of all that is not the content of files: private pages, and each one's part of anonymous shared mappings."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/statm").read_bytes().split()
            resident, shared = (int(field) * _PAGE for field in fields[1:3])
            total += resident - shared
            if shared > _SHARED_WORTH_A_LOOK:
                total += _shared_memory(Path(f"/proc/{pid}/smaps_rollup").read_bytes())
        except (OSError, ValueError):
            continue
    return total


def _shared_memory(rollup: bytes) -> int:
    """Of shared memory a process is counted its part: n processes with one mapping do not hold it n times."""
    for line in rollup.splitlines():
        if line.startswith(b"Pss_Shmem:"):
            return int(line.split()[1]) * 1024
    return 0


def files_in_memory(pid: int) -> int:
    """Files of the file system that holds ``pid``'s /tmp; 0 when it is gone. Empty ones take memory too, which no size bounds."""
    try:
        info = os.statvfs(f"/proc/{pid}/root/tmp")
    except OSError:
        return 0
    return info.f_files - info.f_ffree


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
