"""The images built or unpacked on this machine, each once, and their removal.

    CACHE/images/sha256-…          an unpacked root directory, named by the digest of what it was made from; never written to again
                 sha256-….json     what it was made from, when
                 sha256-….lock     held shared (flock) by every process that uses it, exclusively by who builds or removes it;
                                   its time is that of the last use
                 .sha256-….….new   being built, or left by a builder that died

A reader takes the shared lock and then looks whether the directory is there; a builder and a remover hold the exclusive one. So several
workers that need the same image build it once, and none is removed while a process that resolved it lives.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcrl.errors import EnvironmentFault
from hpcrl.sandbox.locks import alone, is_free
from hpcrl.sandbox.trees import remove_tree

__all__ = ["CachedImage", "build_once", "cached_images", "prune"]

_HELD: dict[Path, int] = {}
"""Image → descriptor of its lock, held until this process ends."""
_GUARD = threading.Lock()
_PREFIX = "sha256-"
_RETRY_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedImage:
    """Times in seconds since the epoch. ``size`` in bytes on disk."""

    key: str
    path: Path
    source: str
    built_at: float
    used_at: float
    size: int
    in_use: bool


def build_once(target: Path, builder: Callable[[Path], None], source: Path, build: bool = True) -> Path:
    """``target``, made by ``builder`` unless it is there; in use by this process from now on.

    Raises EnvironmentFault when it cannot be built, or must be and ``build`` is False.
    """
    if _claimed(target):
        return target
    if not build:
        raise EnvironmentFault(f"image {source} is not built yet: run tools/build-image {source}")
    target.parent.mkdir(parents=True, exist_ok=True)
    while not _claimed(target):
        with alone(_lock(target)) as free:
            if free and not target.is_dir():
                _build(target, builder, source)
        if not free:
            _wait_for_builder(target)
    return target


def _build(target: Path, builder: Callable[[Path], None], source: Path) -> None:
    print(f"building sandbox image {source} (once)", file=sys.stderr, flush=True)
    new = target.with_name(f".{target.name}.{secrets.token_hex(4)}.new")
    try:
        builder(new)
        os.chmod(new, 0o755)
        _note(target).write_text(json.dumps({"source": str(source), "built_at": time.time()}), encoding="utf-8")
        new.rename(target)
    finally:
        remove_tree(new)


def _wait_for_builder(target: Path) -> None:
    """Until nobody holds the lock alone. Not by waiting to be alone oneself: those who use the image keep their shared lock."""
    descriptor = os.open(_lock(target), os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)
    time.sleep(random.uniform(0, _RETRY_S))  # several that wait must not keep each other from being alone


def _claimed(target: Path) -> bool:
    """Take the shared lock of an image for the life of this process; False when there is no such image."""
    with _GUARD:
        if not target.is_dir():
            if target in _HELD:
                os.close(_HELD.pop(target))
            return False
        if target in _HELD:
            return True
        try:
            descriptor = os.open(_lock(target), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            return True  # a cache that only its owner may write: who else uses it cannot keep it from being removed
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if not target.is_dir():
            os.close(descriptor)
            return False
        with suppress(OSError):
            os.utime(descriptor)
        _HELD[target] = descriptor
        return True


def cached_images(cache: Path) -> list[CachedImage]:
    """Images below ``cache``/images, the last used first."""
    found = [_describe(path) for path in (cache / "images").glob(_PREFIX + "*") if path.is_dir()]
    return sorted(found, key=lambda image: -image.used_at)


def _describe(path: Path) -> CachedImage:
    try:
        note = json.loads(_note(path).read_text(encoding="utf-8"))
        source, built_at = str(note["source"]), float(note["built_at"])
    except (OSError, ValueError, KeyError, TypeError):
        source, built_at = "", path.stat().st_mtime
    lock = _lock(path)
    return CachedImage(
        key=path.name,
        path=path,
        source=source,
        built_at=built_at,
        used_at=lock.stat().st_mtime if lock.exists() else built_at,
        size=_size(path),
        in_use=not is_free(lock),
    )


def prune(cache: Path, unused_s: float, keys: tuple[str, ...] = (), dry_run: bool = False) -> list[CachedImage]:
    """Remove images that no process uses and none has used for ``unused_s`` (``keys``: only these); returns those removed.

    Also what builders that died have left. An image in use is never taken.
    """
    removed = []
    for image in cached_images(cache):
        wanted = image.key in keys if keys else True
        if not wanted or image.in_use or time.time() - image.used_at < unused_s:
            continue
        if dry_run or _remove(image.path):
            removed.append(image)
    if not dry_run:
        for left in (cache / "images").glob(f".{_PREFIX}*.new"):
            if is_free(_lock(left.with_name(left.name[1:].split(".")[0]))):
                remove_tree(left)
    return removed


def _remove(path: Path) -> bool:
    with alone(_lock(path)) as free:
        if not free:
            return False
        gone = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
        path.rename(gone)
        _note(path).unlink(missing_ok=True)
    remove_tree(gone)
    return True


def _lock(target: Path) -> Path:
    return target.with_name(target.name + ".lock")


def _note(target: Path) -> Path:
    return target.with_name(target.name + ".json")


def _size(path: Path) -> int:
    return sum(
        os.lstat(os.path.join(folder, name)).st_blocks * 512 for folder, _, names in os.walk(path) for name in names
    )
