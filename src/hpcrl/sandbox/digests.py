"""Digests of directory trees, for `environment_version` and `verifier_version`."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from hpcrl.sandbox.trees import read_file, walk

__all__ = ["combine", "shape_digest", "tree_digest"]


def combine(*parts: str) -> str:
    """One digest of several texts: ``sha256-`` and 64 hex digits. Unambiguous: lengths are part of it."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogateescape")
        digest.update(b"%d:" % len(data) + data)
    return "sha256-" + digest.hexdigest()


def tree_digest(directory: Path) -> str:
    """Digest of all content below ``directory``: paths, kinds, executable bits, bytes, link targets. Raises OSError."""
    return _digest(directory, content=True)


def shape_digest(directory: Path) -> str:
    """As ``tree_digest`` with sizes instead of bytes: what is affordable for an image of thousands of files."""
    return _digest(directory, content=False)


def _digest(directory: Path, content: bool) -> str:
    parts: list[str] = []
    root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for entry in walk(root):
            mode = entry.info.st_mode
            if stat.S_ISLNK(mode):
                detail = os.readlink(entry.name, dir_fd=entry.parent)
            elif stat.S_ISREG(mode):
                size = entry.info.st_size
                data = hashlib.sha256(read_file(entry.parent, entry.name, size)).hexdigest() if content else str(size)
                detail = f"{'x' if mode & 0o100 else '-'} {data}"
            else:
                detail = ""
            parts += [entry.path, str(stat.S_IFMT(mode)), detail]
    finally:
        os.close(root)
    return combine(*parts)
