"""The double buffer of a node: two files in shared memory, one active (served, and to be reloaded from), one standby.

    hpcrl-<run_id>-<replica>-<0|1|…>.weights    mode 0600; the owner holds an exclusive flock for as long as it lives

The lock tells a dead run's leftovers from a live run's files: whatever can be locked has no owner and is removed at start.

Standby bytes become active only by :meth:`Staging.flipped`, after the flip; until then the active half is untouched. While replicas of
the node hold different versions (one failed its flip) each version's copy stays, for each may have to be loaded again, and a further
file is the standby; it goes when they agree again.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

from hpcrl.errors import EnvironmentFault, InfraError

__all__ = ["ADAPTERS_SUFFIX", "DEFAULT_DIRECTORY", "Staging", "remove_leftovers", "safe_name", "try_lock"]

DEFAULT_DIRECTORY = Path("/dev/shm")
ADAPTERS_SUFFIX = ".adapters"
"""Of the directory that a replica's adapters lie in (adapter_store.py)."""
_SUFFIX = ".weights"
_SLOTS = 2


def remove_leftovers(directory: Path = DEFAULT_DIRECTORY) -> list[Path]:
    """Remove this user's staging files and adapter directories that no live process holds; returns their paths."""
    removed = []
    for path in sorted([*directory.glob(f"hpcrl-*{_SUFFIX}"), *directory.glob(f"hpcrl-*{ADAPTERS_SUFFIX}")]):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or just gone
        try:
            if os.fstat(descriptor).st_uid == os.getuid() and try_lock(descriptor):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
                removed.append(path)
        finally:
            os.close(descriptor)
    return removed


class _Slot:
    """One file, mapped; grows or shrinks to the size of the version it receives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = _create_locked(path)
        self._map: mmap.mmap | None = None
        self._view: memoryview | None = None
        self._nbytes = 0

    def view(self, nbytes: int) -> memoryview:
        if self._view is None or self._nbytes != nbytes:
            self._resize(nbytes)
        if self._view is None:
            raise InfraError("staging_closed", f"{self.path} has no memory")
        return self._view

    def _resize(self, nbytes: int) -> None:
        self._unmap()
        size = max(nbytes, 1)  # an empty file cannot be mapped
        try:
            os.ftruncate(self._descriptor, size)
            # Reserve now: a full /dev/shm would otherwise kill the process by SIGBUS at the first touch.
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError as error:
            os.ftruncate(self._descriptor, 0)
            if error.errno != errno.ENOSPC:
                raise
            free = shutil.disk_usage(self.path.parent).free
            raise InfraError(
                "staging_full",
                f"{self.path.parent} has {free >> 20} MiB left, no room for {-(-nbytes >> 20)} MiB of weights: a node needs two copies "
                "of the model there; remove what others left in it, or make it larger",
            ) from error
        self._map = mmap.mmap(self._descriptor, size)
        self._view = memoryview(self._map)[:nbytes]
        self._nbytes = nbytes

    def _unmap(self) -> None:
        if self._view is not None:
            self._view.release()
        if self._map is not None:
            self._map.close()
        self._view = self._map = None

    def close(self) -> None:
        if self._descriptor < 0:
            return
        self.path.unlink(missing_ok=True)
        try:
            self._unmap()
        finally:
            os.close(self._descriptor)
            self._descriptor = -1


class Staging:
    """The slots of one node's replicas. A context manager; leaving it removes all files.

    ``directory`` must be memory-backed and on the replicas' node. Raises EnvironmentFault when it cannot be used.
    """

    def __init__(self, run_id: str, replica: str, directory: Path = DEFAULT_DIRECTORY) -> None:
        if not directory.is_dir():
            raise EnvironmentFault(f"the staging directory {directory} does not exist on this node")
        remove_leftovers(directory)
        self._prefix = directory / f"hpcrl-{safe_name(run_id, replica)}"
        self._slots: list[_Slot] = []
        self._held: dict[int, _Slot] = {}
        try:
            self._standby = self._new_slot()
            self._new_slot()
        except BaseException:
            self.close()
            raise

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files."""
        return tuple(slot.path for slot in self._slots)

    @property
    def standby_path(self) -> Path:
        """File of the part that may be overwritten."""
        return self._standby.path

    def standby(self, nbytes: int) -> memoryview:
        """The standby part as ``nbytes`` writable bytes. Raises InfraError("staging_full") when there is no room."""
        return self._standby.view(nbytes)

    def flipped(self, replicas: Collection[int]) -> None:
        """These replicas (by number) hold the standby copy now. The next standby is a copy that no replica holds any more."""
        if not replicas:
            return
        self._held |= dict.fromkeys(replicas, self._standby)
        free = [slot for slot in self._slots if slot not in self._held.values()]
        self._standby = free.pop(0) if free else self._new_slot()
        while free and len(self._slots) > _SLOTS:
            slot = free.pop()
            self._slots.remove(slot)
            slot.close()

    def _new_slot(self) -> _Slot:
        paths = (self._prefix.with_name(f"{self._prefix.name}-{number}{_SUFFIX}") for number in itertools.count())
        slot = _Slot(next(path for path in paths if path not in self.paths))
        self._slots.append(slot)
        return slot

    def close(self) -> None:
        """Remove all files; memory still mapped elsewhere lives until unmapped there. Views must not be held."""
        for slot in self._slots:
            slot.close()

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def safe_name(run_id: str, replica: str) -> str:
    """A replica of a run, as part of a file name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", f"{run_id}-{replica}")


def try_lock(descriptor: int) -> bool:
    """Take the exclusive lock of an open file or directory, for as long as it is open; False when another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _create_locked(path: Path) -> int:
    """Create ``path`` and lock it. Another process may sweep it between the two calls: look, and try again."""
    for _ in range(10):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise EnvironmentFault(f"cannot create the staging file {path}: {error.strerror}") from error
        if not try_lock(descriptor):
            os.close(descriptor)
            raise EnvironmentFault(f"the staging file {path} belongs to a process that is still running")
        if os.fstat(descriptor).st_nlink:
            os.fchmod(descriptor, 0o600)
            return descriptor
        os.close(descriptor)
    raise EnvironmentFault(f"the staging file {path} is removed again and again by another process")
