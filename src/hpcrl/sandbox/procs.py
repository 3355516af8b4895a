"""Processes of a sandbox, seen from the host through /proc."""

from __future__ import annotations

import mmap
import os
import signal
import stat
from functools import cache
from pathlib import Path

__all__ = [
    "children",
    "descendants",
    "files_in_memory",
    "kill_all",
    "memory_bytes",
    "reaped_faults",
    "session",
    "unnamed_bytes",
]

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
            holder, resident, shared = _holder(pid)
            total += resident - shared
            if shared > _SHARED_WORTH_A_LOOK:
                total += _shared_memory(Path(f"/proc/{holder}/smaps_rollup").read_bytes())
        except (OSError, ValueError):
            continue
    return total


def _holder(pid: int) -> tuple[int, int, int]:
    """A thread of ``pid`` that shows its memory, resident and shared bytes of it. The first one may have ended before the others."""
    found = (pid, 0, 0)
    for thread in (pid, *_threads(pid)):
        fields = Path(f"/proc/{thread}/statm").read_bytes().split()
        found = (thread, int(fields[1]) * _PAGE, int(fields[2]) * _PAGE)
        if found[1] > 0:
            break
    return found


def _threads(pid: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]


def _shared_memory(rollup: bytes) -> int:
    """Of shared memory a process is counted its part: n processes with one mapping do not hold it n times."""
    for line in rollup.splitlines():
        if line.startswith(b"Pss_Shmem:"):
            return int(line.split()[1]) * 1024
    return 0


def unnamed_bytes(pids: list[int], elsewhere: int) -> int:
    """Disk held by files without a name that these processes have open or mapped, but for the file system ``elsewhere`` (st_dev).

    Cost: a stat per open file of each thread, since a thread may have a table of its own.
    """
    held: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            threads = _threads(pid)
        except OSError:
            continue
        for thread in threads:
            for key, size in _unnamed_maps(thread):
                held[key] = max(size, held.get(key, 0))
            for key, size in _unnamed_open(thread):
                held[key] = size  # what it takes is known better than from a mapping, which may span holes
    return sum(size for (device, _), size in held.items() if device not in (elsewhere, _memory_device()))


def _unnamed_open(thread: int) -> list[tuple[tuple[int, int], int]]:
    found = []
    try:
        names = os.listdir(f"/proc/{thread}/fd")
    except OSError:
        return []
    for name in names:
        try:
            info = os.stat(f"/proc/{thread}/fd/{name}")
        except OSError:
            continue
        if stat.S_ISREG(info.st_mode) and info.st_nlink == 0:
            found.append(((info.st_dev, info.st_ino), info.st_blocks * 512))
    return found


def _unnamed_maps(thread: int) -> list[tuple[tuple[int, int], int]]:
    try:
        maps = Path(f"/proc/{thread}/maps").read_bytes()
    except OSError:
        return []
    found = []
    for line in maps.splitlines():
        if line.endswith(b" (deleted)"):
            place, _, offset, device, inode = line.split(None, 5)[:5]
            begin, end = (int(part, 16) for part in place.split(b"-"))
            found.append(((_device(device), int(inode)), int(offset, 16) + end - begin))
    return found


def _device(text: bytes) -> int:
    major, minor = (int(part, 16) for part in text.split(b":"))
    return os.makedev(major, minor)


@cache
def _memory_device() -> int:
    """Where the kernel keeps anonymous shared memory, which maps show as deleted files; by our own. -1: it does not say."""
    with mmap.mmap(-1, _PAGE):
        maps = Path("/proc/self/maps").read_bytes()
    shared = (line.split() for line in maps.splitlines() if line.endswith(b"/dev/zero (deleted)"))
    return next((_device(fields[3]) for fields in shared), -1)


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
