"""The bounds of ``hpcrl bench sandbox``: plain ``apptainer exec`` with our sandboxes' options, and commands without a server."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from hpcrl.errors import RunError
from hpcrl.sandbox.apptainer import Bind, exec_argv, find_apptainer, sandbox_owner
from hpcrl.sandbox.seccomp import profile
from hpcrl.sandbox.server import ENTRY

__all__ = ["BARE", "Raw"]

# Prints the milliseconds of each, as JSON (a minimal Python has no json): argv is how often, then the command.
BARE = r"""
import os, sys, time
took = []
for _ in range(int(sys.argv[1])):
    out, into = os.pipe()
    actions = [(os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, into, 1)]
    began = time.perf_counter()
    pid = os.posix_spawn("/bin/bash", ["bash", "-c", sys.argv[2]], os.environ, file_actions=actions)
    os.waitpid(pid, 0)
    took.append(1e3 * (time.perf_counter() - began))
    os.close(into)
    os.close(out)
print(took)
"""


class Raw:
    """One container after the other on directories that are already there. ``folder`` must be passable to the sandboxes' user."""

    def __init__(self, image: Path, folder: Path, tests: Path) -> None:
        self._owner = sandbox_owner()
        self._logs = folder / "logs"
        self._binds = []
        for name, target in (("work", "/work"), ("shm", "/dev/shm"), ("logs", "/logs/verifier")):
            (folder / name).mkdir()
            if self._owner is not None:
                os.chown(folder / name, self._owner, self._owner)
            self._binds.append(Bind(folder / name, target, True))
        self._binds.append(Bind(tests, "/tests", False))
        self._image = image
        self._seccomp = folder / "seccomp.json"
        self._seccomp.write_text(profile())
        self._seccomp.chmod(0o644)

    def _spawn(self, *command: str) -> subprocess.Popen[bytes]:
        argv = exec_argv(find_apptainer(), self._image, self._binds, "/work", self._owner, self._seccomp)
        argv = argv[: -len(ENTRY)]
        env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/nonexistent"}
        return subprocess.Popen(
            [*argv, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd="/", start_new_session=True
        )

    def start(self) -> float:
        """Seconds from the call to the first line of a shell inside."""
        began = time.perf_counter()
        process = self._spawn("/bin/sh", "-c", "echo ready; exec cat")
        if process.stdin is None or process.stdout is None:
            raise RunError("bench: no pipes")
        line = process.stdout.readline()
        took = time.perf_counter() - began
        process.communicate()  # its input ends, and so does it
        if line != b"ready\n":
            raise RunError(f"bench: plain apptainer exec ended with status {process.returncode}")
        return took

    def score(self) -> float:
        """Seconds from the call until the tests have ended and their reward was read."""
        reward = self._logs / "reward.txt"
        reward.unlink(missing_ok=True)
        began = time.perf_counter()
        process = self._spawn("bash", "/tests/test.sh")
        process.communicate()
        content = reward.read_bytes() if reward.exists() else b""
        took = time.perf_counter() - began
        if content != b"1\n":
            raise RunError(
                f"bench: plain apptainer exec of the tests ended with status {process.returncode}, no reward"
            )
        return took
