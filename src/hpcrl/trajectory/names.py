"""Names of shards. ``WRITER-00007.h5.partial`` is being written; ``WRITER-00007.<32 hex digits>.h5`` is sealed.

The digest in the name is that of the whole file (XXH3-128: it finds damage, it is no signature). So whoever is told a shard's name
(the coordinator, a batch) is told its content, and a shard can be verified by itself.
"""

from __future__ import annotations

import os
import re
from mmap import mmap
from pathlib import Path

import xxhash

__all__ = ["QUARANTINE", "digest_in_name", "digest_of", "quarantine", "sealed_name", "shard_number"]

QUARANTINE = "quarantine"
"""Folder beside the shards for those that could not be read: kept for a look, read by nobody."""

_SEALED = re.compile(r".+\.([0-9a-f]{32})\.h5")


def digest_of(content: bytes | mmap) -> str:
    """32 hex digits."""
    return xxhash.xxh3_128_hexdigest(content)


def digest_in_name(name: str) -> str | None:
    """The digest that a sealed shard's name carries; None for a name without one."""
    found = _SEALED.fullmatch(name)
    return found[1] if found else None


def sealed_name(partial: Path, content: bytes | mmap) -> Path:
    """``W-00007.h5.partial`` with ``content`` → ``W-00007.DIGEST.h5``."""
    return partial.with_name(f"{partial.name.removesuffix('.h5.partial')}.{digest_of(content)}.h5")


def shard_number(name: str, writer_id: str) -> int | None:
    """The number of a shard of this writer, sealed or not; None for another's file."""
    if not name.startswith(f"{writer_id}-"):
        return None
    number = name.removeprefix(f"{writer_id}-").split(".", 1)[0]
    return int(number) if number.isdecimal() else None


def quarantine(path: Path) -> Path:
    """Move a bad shard out of the way, under a name that is free; a shard that is gone already stays gone. Returns where it is."""
    folder = path.parent / QUARANTINE
    folder.mkdir(exist_ok=True)
    target = folder / path.name
    number = 0
    while target.exists():
        number += 1
        target = folder / f"{path.name}.{number}"
    if path.exists():
        os.rename(path, target)
    return target
