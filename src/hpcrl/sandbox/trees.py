"""File trees that an agent may have prepared against us: symlinks, FIFOs, unreadable or endless directories.

Every step is relative to an open directory and refuses links (O_NOFOLLOW), so that nothing outside the tree can be reached, also
while the agent's processes still run. Depth is bounded: a descriptor is held per level. Paths are relative, "/"-separated, with
undecodable bytes as surrogates.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = [
    "MAX_DEPTH",
    "Entry",
    "TreeTooDeep",
    "copy_tree",
    "make_link",
    "open_parent",
    "read_file",
    "remove_tree",
    "walk",
    "write_file",
]

MAX_DEPTH = 64
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO must not wait for a writer.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class TreeTooDeep(OSError):
    """More than MAX_DEPTH directories inside each other."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing in a tree: ``path`` relative to its root, ``info`` from lstat, ``parent`` the open directory (valid during the
    walk step only), ``name`` in it."""

    path: str
    info: os.stat_result
    parent: int
    name: str


def walk(root: int, make_accessible: bool = False, _prefix: str = "", _depth: int = 0) -> Iterator[Entry]:
    """All entries below the open directory ``root``, each directory before its content, in name order.

    ``make_accessible`` gives the owner access to directories that refuse it. Entries that vanish meanwhile are skipped.
    Raises TreeTooDeep.
    """
    if _depth > MAX_DEPTH:
        raise TreeTooDeep(errno.ELOOP, "directories nested too deep", _prefix)
    try:
        names = sorted(os.listdir(root))
    except PermissionError:
        return
    for name in names:
        try:
            info = os.stat(name, dir_fd=root, follow_symlinks=False)
        except OSError:
            continue
        yield Entry(_prefix + name, info, root, name)
        if not stat.S_ISDIR(info.st_mode):
            continue
        try:
            if make_accessible and info.st_mode & 0o700 != 0o700:
                _give_access(root, name, stat.S_IMODE(info.st_mode) | 0o700)
            child = os.open(name, _DIRECTORY, dir_fd=root)
        except OSError:
            continue
        try:
            yield from walk(child, make_accessible, f"{_prefix}{name}/", _depth + 1)
        finally:
            os.close(child)


def _give_access(parent: int, name: str, mode: int) -> None:
    """chmod of a directory that follows no link even in a race (fchmodat cannot do that before Linux 6.6)."""
    descriptor = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{descriptor}", mode)
    finally:
        os.close(descriptor)


@contextmanager
def open_parent(root: int, path: str, create: bool = False, owner: int | None = None) -> Iterator[tuple[int, str]]:
    """Yield (open parent directory, last name) of ``path`` below ``root``, following no link.

    ``create`` makes missing directories, owned by ``owner``. Raises ValueError for an empty, absolute or ``..`` path.
    """
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path or len(parts) > MAX_DEPTH:
        raise ValueError(f"{path!r} is not a path inside the work directory")
    current = os.dup(root)
    try:
        for part in parts[:-1]:
            if create:
                _make_directory(current, part, owner)
            following = os.open(part, _DIRECTORY, dir_fd=current)
            os.close(current)
            current = following
        yield current, parts[-1]
    finally:
        os.close(current)


def _make_directory(parent: int, name: str, owner: int | None) -> None:
    try:
        os.mkdir(name, 0o755, dir_fd=parent)
    except FileExistsError:
        return
    if owner is not None:
        os.chown(name, owner, owner, dir_fd=parent, follow_symlinks=False)


def read_file(parent: int, name: str, max_bytes: int) -> bytes:
    """At most ``max_bytes`` of a regular file. Raises ValueError when it is none, OSError otherwise."""
    descriptor = os.open(name, _READ, dir_fd=parent)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{name!r} is not a regular file")
        blocks: list[bytes] = []
        left = max_bytes
        while left > 0 and (block := os.read(descriptor, min(left, 1 << 20))):
            blocks.append(block)
            left -= len(block)
        return b"".join(blocks)
    finally:
        os.close(descriptor)


def write_file(parent: int, name: str, content: bytes, mode: int = 0o644, owner: int | None = None) -> None:
    """Create or replace: always a new file, so that a link, FIFO or hard link of that name is replaced, never written through."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, mode, dir_fd=parent)
    with open(descriptor, "wb", buffering=0) as file:
        os.fchmod(descriptor, mode)
        if owner is not None:
            os.fchown(descriptor, owner, owner)
        view = memoryview(content)
        while view:
            view = view[file.write(view) or 0 :]


def copy_tree(source: Path, target: int, owner: int | None = None) -> None:
    """Copy the content of ``source`` (trusted) into the open directory ``target``; later copies win over earlier ones.

    Files, directories and links are kept, modes too (without set-id bits); anything else is left out. Raises OSError.
    """
    descriptor = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for entry in walk(descriptor):
            kind = stat.S_IFMT(entry.info.st_mode)
            mode = stat.S_IMODE(entry.info.st_mode) & 0o777
            with open_parent(target, entry.path) as (parent, name):
                if kind == stat.S_IFDIR:
                    _make_directory(parent, name, owner)
                    os.chmod(name, mode | 0o700, dir_fd=parent)
                elif kind == stat.S_IFREG:
                    content = read_file(entry.parent, entry.name, entry.info.st_size)
                    write_file(parent, name, content, mode | 0o600, owner)
                elif kind == stat.S_IFLNK:
                    make_link(parent, name, os.readlink(entry.name, dir_fd=entry.parent), owner)
    finally:
        os.close(descriptor)


def make_link(parent: int, name: str, target: str, owner: int | None = None) -> None:
    """Create or replace a symbolic link; it is never followed here."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)
    os.symlink(target, name, dir_fd=parent)
    if owner is not None:
        os.chown(name, owner, owner, dir_fd=parent, follow_symlinks=False)


def remove_tree(path: Path) -> None:
    """Remove ``path`` whatever its modes and depth. No process of the agent may be left. Missing is fine; raises OSError."""
    try:
        _remove_below(path)
    except OSError:
        # Too deep for one descriptor per level, or a race with a dying process: the external tools have no depth limit.
        subprocess.run(["chmod", "-R", "u+rwx", "--", str(path)], check=False, capture_output=True)
        subprocess.run(["rm", "-rf", "--one-file-system", "--", str(path)], check=False, capture_output=True)
        if os.path.lexists(path):
            raise


def _remove_below(path: Path) -> None:
    try:
        root = os.open(path, _DIRECTORY)
    except FileNotFoundError:
        return
    except PermissionError:
        os.chmod(path, 0o700)
        root = os.open(path, _DIRECTORY)
    try:
        os.fchmod(root, 0o700)
        directories: list[str] = []
        for entry in walk(root, make_accessible=True):
            if stat.S_ISDIR(entry.info.st_mode):
                directories.append(entry.path)
            else:
                os.unlink(entry.name, dir_fd=entry.parent)
        for directory in reversed(directories):
            with open_parent(root, directory) as (parent, name):
                os.rmdir(name, dir_fd=parent)
    finally:
        os.close(root)
    os.rmdir(path)
