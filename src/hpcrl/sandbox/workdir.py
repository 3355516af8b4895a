"""The work directory of one attempt: a private host directory that is bind-mounted into the sandbox.

    SCRATCH/WORKER/ATTEMPT/work        the sandbox's work directory
                           shm         its /dev/shm
                           mount0 …    its other mounts, in order

A host directory rather than one inside the container: files are read and written without a process start, and the artifact
survives whatever the agent does to its container. The price is that the host touches a tree an agent controls; trees.py does
that without ever following a link. All methods block; callers in an event loop use threads.
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hpcrl.errors import PolicyError
from hpcrl.sandbox.artifact import apply_artifact, pack
from hpcrl.sandbox.base import Mount, SandboxSpec
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.trees import (
    Entry,
    TreeTooDeep,
    copy_tree,
    open_parent,
    read_file,
    remove_tree,
    walk,
    write_file,
)

__all__ = ["WorkDir"]

_CLOCK_TICK_NS = 20_000_000
"""More than the step of the clock that files are stamped with."""


@dataclass(frozen=True, slots=True)
class _Original:
    info: os.stat_result
    source: Path | None


class WorkDir:
    """``target`` is where the sandbox sees it; ``owner`` the user and group id that own its files, None for the caller's own."""

    def __init__(self, attempt: Path, target: str, owner: int | None) -> None:
        self.attempt = attempt
        self.target = PurePosixPath(target)
        self.work = attempt / "work"
        self.shm = attempt / "shm"
        self._owner = owner
        self._original: dict[str, _Original] = {}
        self._settled_ns = 0
        self._root = -1
        self._watched = [self.shm]

    def create(self, spec: SandboxSpec) -> None:
        """Make the directories, empty, so that a container can start on them. Raises OSError."""
        mounts = spec.mounts
        self.attempt.mkdir(mode=0o711 if self._owner is not None else 0o700)
        for directory in (self.work, self.shm, *(self.mount(index) for index in range(len(mounts)))):
            directory.mkdir(mode=0o755)
            if self._owner is not None:
                os.chown(directory, self._owner, self._owner)
        self._root = _open(self.work)
        self._watched += [self.mount(index) for index, mount in enumerate(mounts) if mount.writable]

    def add_image(self, spec: SandboxSpec) -> None:
        """Copy what the image itself has at the place of the work directory. Raises OSError."""
        for source in _image_content(spec):
            copy_tree(source, self._root, self._owner)

    def add_attempt(self, spec: SandboxSpec) -> None:
        """Copy the attempt's files and mounts, apply its artifact; the work directory is then as the attempt finds it.

        Raises OSError, DataError("artifact_corrupt").
        """
        files = [source for source in spec.files if source.is_dir()]
        for source in files:
            copy_tree(source, self._root, self._owner)
        self._fill(spec.mounts)
        if spec.artifact is not None:
            apply_artifact(spec.artifact, self._root, self._owner, 2 * spec.limits.artifact_bytes)
        self._remember(() if spec.artifact is not None else (*_image_content(spec), *files))

    def _fill(self, mounts: tuple[Mount, ...]) -> None:
        for index, mount in enumerate(mounts):
            if mount.source is not None:
                descriptor = _open(self.mount(index))
                try:
                    copy_tree(mount.source, descriptor, self._owner)
                finally:
                    os.close(descriptor)

    def mount(self, index: int) -> Path:
        """Host path of the mount with that index."""
        return self.attempt / f"mount{index}"

    def _remember(self, sources: tuple[Path, ...]) -> None:
        """Take the present content, made of ``sources``, as the initial one: the artifact is what differs from it."""
        # What was written a moment ago may be written again under the same time.
        self._settled_ns = time.time_ns() - _CLOCK_TICK_NS
        for entry in walk(self._root):
            source = next((s for s in reversed(sources) if os.path.lexists(s / entry.path)), None)
            self._original[entry.path] = _Original(entry.info, source / entry.path if source is not None else None)

    def relative(self, path: str) -> str:
        """``path`` as seen in the sandbox, relative to the work directory. Raises ValueError when it is outside."""
        pure = PurePosixPath(path)
        if pure.is_absolute():
            if not pure.is_relative_to(self.target):
                raise ValueError(f"{path!r} is not inside the work directory {self.target}")
            pure = pure.relative_to(self.target)
        return str(pure)

    def read(self, path: str, max_bytes: int) -> bytes:
        with open_parent(self._root, self.relative(path)) as (parent, name):
            return read_file(parent, name, max_bytes)

    def read_mount(self, index: int, path: str, max_bytes: int) -> bytes:
        root = _open(self.mount(index))
        try:
            with open_parent(root, path) as (parent, name):
                return read_file(parent, name, max_bytes)
        finally:
            os.close(root)

    def write(self, path: str, content: bytes) -> None:
        with open_parent(self._root, self.relative(path), create=True, owner=self._owner) as (parent, name):
            write_file(parent, name, content, owner=self._owner)

    def locked(self, index: int, names: tuple[str, ...]) -> bool:
        """Whether modes keep their owner from writing to one of these files of a mount, or from making it."""
        root = _open(self.mount(index))
        try:
            if os.fstat(root).st_mode & 0o300 != 0o300:
                return True
            present = set(names).intersection(os.listdir(root))
            return any(not os.stat(name, dir_fd=root, follow_symlinks=False).st_mode & 0o200 for name in present)
        finally:
            os.close(root)

    def check_usage(self, limits: Limits, unnamed: int = 0) -> None:
        """Raise PolicyError("disk_limit") when what the sandbox can write to holds too much. Cost: one stat per entry.

        The initial content's entries are free, its bytes are not. ``unnamed``: bytes in files that no directory shows.
        """
        used, entries = unnamed, 0
        if used > limits.disk_bytes:
            raise PolicyError(
                "disk_limit", f"deleted files that are still open hold more than {limits.disk_bytes} bytes"
            )
        roots = [_open(path) for path in (self.work, *self._watched)]
        try:
            for root in roots:
                for entry in walk(root, make_accessible=True):
                    entries += 1
                    used += entry.info.st_blocks * 512
                    if used > limits.disk_bytes or entries > limits.disk_entries + len(self._original):
                        raise PolicyError(
                            "disk_limit",
                            f"the work directory holds more than {limits.disk_bytes} bytes or {limits.disk_entries} entries",
                        )
        except TreeTooDeep as error:
            raise PolicyError("disk_limit", "directories are nested too deep") from error
        finally:
            for root in roots:
                os.close(root)

    def artifact(self, max_bytes: int) -> bytes:
        """What changed since the attempt began, packed. No process of the agent may be left. Raises PolicyError("artifact_limit")."""
        return pack(self._root, self._changed, self._original, max_bytes)

    def _changed(self, entry: Entry) -> bool:
        original = self._original.get(entry.path)
        if original is None:
            return True
        then, now = original.info, entry.info
        # The change time cannot be set by a process, so an equal one means: not touched, unless within the same tick of the clock.
        if _identity(then) == _identity(now) and (original.source is None or then.st_ctime_ns < self._settled_ns):
            return False
        if then.st_mode != now.st_mode or original.source is None:
            return True
        if stat.S_ISDIR(now.st_mode):
            return False
        if stat.S_ISLNK(now.st_mode):
            return os.readlink(entry.name, dir_fd=entry.parent) != os.readlink(original.source)
        if then.st_size != now.st_size:
            return True
        return read_file(entry.parent, entry.name, now.st_size) != original.source.read_bytes()

    def remove(self) -> None:
        """Remove everything; no process of the agent may be left. Raises OSError."""
        if self._root >= 0:
            os.close(self._root)
            self._root = -1
        remove_tree(self.attempt)


def _identity(info: os.stat_result) -> tuple[int, int, int, int]:
    return info.st_ino, info.st_ctime_ns, info.st_mode, info.st_size


def _image_content(spec: SandboxSpec) -> list[Path]:
    source = None if spec.image is None else spec.image / spec.workdir.lstrip("/")
    return [source] if source is not None and source.is_dir() else []


def _open(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
