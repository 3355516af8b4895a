"""Scratch space of a worker, and the removal of what dead workers left: processes, directories.

    BASE/w-3f9c…/lock        held (flock) by the worker as long as it lives
    BASE/w-3f9c…/ATTEMPT/    one sandbox

A worker directory whose lock can be taken belongs to a dead worker. Its containers are found by their mounts: every process of a
container has the worker's directory in /proc/PID/mountinfo, which an agent cannot change for its container's init, and with init
the whole PID namespace dies. Swept at each worker's start, by a guard process when a worker dies, and by the Slurm epilog:

    python -m hpcrl.sandbox.sweep [BASE]
"""

from __future__ import annotations

import fcntl
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

from hpcrl.errors import EnvironmentFault
from hpcrl.sandbox.cgroup import remove_of
from hpcrl.sandbox.locks import is_free
from hpcrl.sandbox.procs import kill_all
from hpcrl.sandbox.trees import remove_tree

__all__ = ["WorkerScratch", "default_base", "sweep"]

_PREFIX = "w-"
_NEW = ".new-"
_NEW_LIFETIME_S = 3600.0
_KILL_S = 5.0


def default_base() -> Path:
    """Node-local scratch: below $HPCRL_SCRATCH, $SLURM_TMPDIR, $TMPDIR or /tmp, one directory per user."""
    for name in ("HPCRL_SCRATCH", "SLURM_TMPDIR", "TMPDIR"):
        if os.environ.get(name):
            return Path(os.environ[name]) / f"hpcrl-{os.geteuid()}"
    return Path("/tmp") / f"hpcrl-{os.geteuid()}"


class WorkerScratch:
    """A worker's own directory below ``base``, locked while it lives, watched by a guard process that sweeps if it dies."""

    def __init__(self, base: Path, open_to: int | None = None) -> None:
        """``open_to``: user id that must be able to pass through (not list) the directories; None: only the owner.

        Raises EnvironmentFault when ``base`` cannot be used.
        """
        mode = 0o700 if open_to is None else 0o711
        _make_base(base, mode)
        token = secrets.token_hex(8)
        # Locked before it gets its name, so that no sweep can take it for a dead one.
        new = base / (_NEW + token)
        new.mkdir(mode=mode)
        self._lock = os.open(new / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = base / (_PREFIX + token)
        new.rename(self.path)
        # Slurm ends a step with SIGTERM to all its processes, the guard among them.
        self._guard = subprocess.Popen(
            [
                "/bin/sh",
                "-c",
                'trap "" TERM; cat >/dev/null; exec "$@"',
                "sh",
                sys.executable,
                "-m",
                __name__,
                str(base),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def new_attempt(self, name: str) -> Path:
        """A path, not yet existing, for one sandbox."""
        plain = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)[:64]
        return self.path / f"{plain}-{secrets.token_hex(4)}"

    def close(self) -> None:
        """Remove the directory, with whatever is still in it."""
        self._guard.kill()
        self._guard.wait()
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        _kill_users(self.path.name)
        remove_tree(self.path)
        os.close(self._lock)


def _make_base(base: Path, mode: int) -> None:
    try:
        base.mkdir(mode=mode, parents=True, exist_ok=True)
        info = os.lstat(base)
        if info.st_uid != os.geteuid() or base.is_symlink():
            raise EnvironmentFault(
                f"scratch directory {base} belongs to somebody else: set HPCRL_SCRATCH to one of your own"
            )
        os.chmod(base, mode)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot use the scratch directory {base}: {error.strerror}; set HPCRL_SCRATCH to a node-local directory"
        ) from error


def sweep(base: Path) -> list[str]:
    """Remove what dead workers left below ``base``; returns the names of their directories. Raises OSError."""
    removed: list[str] = []
    if base.is_symlink():
        return removed
    try:
        names = sorted(os.listdir(base))
    except FileNotFoundError:
        return removed
    for name in names:
        path = base / name
        # Workers make their lock before their directory gets its name: without one, a removal was cut short.
        if name.startswith(_PREFIX) and is_free(path / "lock"):
            _kill_users(name)
        elif not (name.startswith(_NEW) and _age(path) > _NEW_LIFETIME_S):
            continue
        remove_tree(path)
        removed.append(name)
    return removed


def _age(path: Path) -> float:
    try:
        return time.time() - os.lstat(path).st_mtime
    except FileNotFoundError:
        return 0.0


def _kill_users(worker: str) -> None:
    """End every process that has a directory of this worker mounted, and remove the cgroups of its sandboxes. Raises OSError."""
    deadline = time.monotonic() + _KILL_S
    while (pids := _users(worker)) and time.monotonic() < deadline:
        kill_all(pids)
        time.sleep(0.01)
    remove_of(worker)


def _users(worker: str) -> list[int]:
    marker = f"/{worker}/".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            if marker in Path(f"/proc/{name}/mountinfo").read_bytes():
                found.append(int(name))
        except OSError:
            continue
    return found


def main() -> None:
    base = Path(sys.argv[1]) if len(sys.argv) > 1 else default_base()
    for name in sweep(base):
        print(f"removed {base / name}")


if __name__ == "__main__":
    main()
