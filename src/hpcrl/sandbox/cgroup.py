"""A cgroup (v2) per sandbox where this process may make one: memory and processes of all of it are then bounded at once.

    PARENT                       may be written by this user; memory and pids are enabled for its children
    ├── roles …                  this process is in a child, since a cgroup with enabled controllers holds no processes itself
    └── hpcrl-w-3f9c…-ATTEMPT    one sandbox, container runtime included

PARENT is ``$HPCRL_CGROUP``, else the parent of this process's own cgroup (or the root, which may hold processes). Nothing is moved
but sandboxes: whoever starts the job delegates (docs/security.md). Without a delegated one, ulimit and the watch remain.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

from hpcrl.errors import PolicyError
from hpcrl.sandbox.limits import MIB, Limits

__all__ = ["NotDelegated", "SandboxCgroup", "available", "delegated", "remove_of"]

VARIABLE = "HPCRL_CGROUP"
_CONTROLLERS = {"memory", "pids"}
_RUNTIME_BYTES = 16 * MIB
_RUNTIME_TASKS = 48
"""What the container runtime itself takes: two processes of Go with their threads (10 MiB and 14 tasks were seen)."""
_REMOVE_S = 5.0

# Joins before anything is started, so that nothing can be outside.
_JOIN = 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"'


class NotDelegated(Exception):
    """No cgroup can be made here; the message says why, as the end of a sentence."""


@functools.cache
def available() -> Path | None:
    """The cgroup in which this process makes those of its sandboxes; None: there is none."""
    try:
        return delegated()
    except NotDelegated:
        return None


def delegated(own: str | None = None, mounts: str | None = None) -> Path:
    """See the module. ``own``, ``mounts``: content of /proc/self/cgroup and mountinfo. Raises NotDelegated."""
    given = os.environ.get(VARIABLE)
    if given:
        parent = Path(given)
    else:
        own = Path("/proc/self/cgroup").read_text() if own is None else own
        mounts = Path("/proc/self/mountinfo").read_text() if mounts is None else mounts
        parent = _beside(own, mounts)
    _check(parent)
    return parent


def _beside(own: str, mounts: str) -> Path:
    """The cgroup whose children may stand beside this process's own."""
    mounted = [line.split() for line in mounts.splitlines() if " - cgroup2 " in line]
    if not mounted:
        raise NotDelegated("no cgroup2 file system is mounted")
    root, top = Path(mounted[0][4]), mounted[0][3]
    path = next((line[3:] for line in own.splitlines() if line.startswith("0::")), None)
    if path is None or "/.." in path:
        raise NotDelegated("this process's cgroup cannot be seen")
    inside = path.removeprefix(top) if top != "/" else path
    here = root / inside.lstrip("/")
    return here if here == root else here.parent


def _check(parent: Path) -> None:
    try:
        offered = set((parent / "cgroup.controllers").read_text().split())
        enabled = set((parent / "cgroup.subtree_control").read_text().split())
    except OSError as error:
        raise NotDelegated(f"{parent} is no cgroup (v2): {error.strerror}") from error
    if not offered >= _CONTROLLERS:
        raise NotDelegated(f"{parent} lacks the controller {' and '.join(sorted(_CONTROLLERS - offered))}")
    if not os.access(parent, os.W_OK) or not os.access(parent / "cgroup.procs", os.W_OK):
        raise NotDelegated(f"{parent} may not be written by this user")
    if not enabled >= _CONTROLLERS:
        try:
            (parent / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(_CONTROLLERS)))
        except OSError as error:
            raise NotDelegated(f"{parent} cannot enable memory and pids for its children: {error.strerror}") from error


class SandboxCgroup:
    """The cgroup of one sandbox, named after its scratch directory ``attempt``. Blocking calls of some 10 µs each."""

    def __init__(self, parent: Path, attempt: Path) -> None:
        self.path = parent / _name(attempt.parent.name, attempt.name)

    def create(self, limits: Limits) -> None:
        """Raises OSError."""
        self.path.mkdir()
        self.bound(limits)
        self._set("memory.oom.group", 1)
        swap = self.path / "memory.swap.max"
        if swap.exists():
            swap.write_text("0")

    def bound(self, limits: Limits) -> None:
        """Raises OSError."""
        self._set("memory.max", limits.memory_bytes + _RUNTIME_BYTES)
        self._set("pids.max", limits.processes + _RUNTIME_TASKS)

    def _set(self, name: str, value: int) -> None:
        (self.path / name).write_text(str(value))

    def argv(self, argv: list[str]) -> list[str]:
        """``argv``, started inside."""
        return ["/bin/sh", "-c", _JOIN, "sh", str(self.path), *argv]

    def broken_limit(self) -> PolicyError | None:
        """The limit for which the kernel has ended the sandbox, if it has."""
        try:
            events = dict(line.split() for line in (self.path / "memory.events").read_text().splitlines())
        except OSError:
            return None
        if int(events.get("oom_kill", "0")) == 0:
            return None
        allowed = (self.path / "memory.max").read_text().strip()
        return PolicyError("memory_limit", f"the sandbox used more than {allowed} bytes of memory")

    def remove(self) -> None:
        """Kill what is in it and remove it. Raises OSError when that takes too long."""
        _remove(self.path)


def _name(worker: str, attempt: str) -> str:
    return f"hpcrl-{worker}-{attempt}"


def remove_of(worker: str) -> None:
    """Remove the cgroups of a dead worker's sandboxes. Raises OSError."""
    parent = available()
    if parent is not None:
        for path in parent.glob(_name(worker, "*")):
            _remove(path)


def _remove(path: Path) -> None:
    deadline = time.monotonic() + _REMOVE_S
    while True:
        try:
            (path / "cgroup.kill").write_text("1")
            path.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.002)
        else:
            return
