"""The start weights on the node's own disk: copied once per node, for all its ranks, restarts and runs (``model.stage``).

    STAGE/hpcrl-UID/lock               held while somebody copies; the other ranks of the node wait for it
    STAGE/hpcrl-UID/.3f9c….ab12…       being copied; one that a killed rank left is removed by the next
    STAGE/hpcrl-UID/3f9c…/             a model, complete: its name is the digest of what lies in the shared directory

A changed model has another name, so nothing stale is ever read. Nothing is removed: that is the site's cleaning of its scratch.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import time
from pathlib import Path

from hpcrl.config import RunConfig
from hpcrl.errors import EnvironmentFault, UserError

__all__ = ["on_this_node"]

log = logging.getLogger(__name__)

_READ_WHOLE = 1 << 20
"""Bytes; of larger files (weights) name, size and time of change go into the digest, as reading them is what is to be spared."""
_MIB = 1 << 20


def on_this_node(config: RunConfig) -> RunConfig:
    """``config`` with ``model.path`` on this node's disk, copied there if need be; as it is without ``model.stage``.

    Blocks while another process of the node copies. Raises UserError, EnvironmentFault.
    """
    if config.model.stage is None:
        return config
    source, place = Path(config.model.path), os.path.expandvars(config.model.stage)
    if "$" in place or not Path(place).is_absolute():
        raise UserError(f"model.stage: {place} must be an absolute path, of variables that are set on every node")
    base = Path(place) / f"hpcrl-{os.geteuid()}"
    try:
        _own(base)
        target = _copied(source, base)
    except OSError as error:
        raise EnvironmentFault(
            f"model.stage: cannot copy {source} to {base}: {error.strerror}; choose a directory on the nodes' own disks that you "
            "can write to, or leave model.stage out"
        ) from error
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(target)})})


def _own(base: Path) -> None:
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    if base.is_symlink() or base.stat().st_uid != os.geteuid():
        raise EnvironmentFault(f"model.stage: {base} belongs to somebody else; choose another directory")


def _files(source: Path) -> list[Path]:
    return sorted(path for path in source.rglob("*") if path.is_file())


def _digest(source: Path) -> str:
    found = hashlib.sha256()
    for path in _files(source):
        info = path.stat()
        content = path.read_bytes() if info.st_size <= _READ_WHOLE else str(info.st_mtime_ns).encode()
        found.update(f"{path.relative_to(source)}\0{info.st_size}\0".encode() + hashlib.sha256(content).digest())
    return found.hexdigest()[:32]


def _copied(source: Path, base: Path) -> Path:
    name = _digest(source)
    target = base / name
    if target.is_dir():
        return target
    with open(base / "lock", "wb") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        for left in base.glob(f".{name}.*"):
            shutil.rmtree(left)
        needed, free = sum(path.stat().st_size for path in _files(source)), shutil.disk_usage(base).free
        if needed > free:
            raise EnvironmentFault(
                f"model.stage: {base} has {free // _MIB} MiB free, the model in {source} {needed // _MIB} MiB; make room, or leave "
                "model.stage out"
            )
        began, new = time.monotonic(), base / f".{name}.{secrets.token_hex(4)}"
        for path in _files(source):
            copy = new / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            with open(copy, "rb") as file:
                os.fsync(file.fileno())
        if _digest(source) != name:
            shutil.rmtree(new)
            raise EnvironmentFault(
                f"model.stage: {source} changed while it was copied; start again when it is complete"
            )
        new.rename(target)
        log.info("model: %d MiB copied to %s in %.1f s", needed // _MIB, target, time.monotonic() - began)
    return target
