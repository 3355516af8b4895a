"""The Apptainer backend: one long-lived hardened ``apptainer exec`` per attempt, from an unpacked image directory.

An unpacked directory starts in half the time of a .sif and needs no FUSE. What the container gets:

    own user, PID, IPC, UTS, mount and network namespaces; the network has no interface but its own loopback
    no host environment, home, /sys, /etc/hosts or devices; a private /tmp (64 MiB in memory, `sessiondir max size`)
    no capabilities, no new privileges, no system calls of seccomp.py; the image
    read-only below a small writable layer (none where tests are guarded)
    the attempt's host directory at the work directory

Run by root, Apptainer is started as `nobody`: a container's root would be the host's root without capabilities, and that may
still write /proc/sys (core_pattern) and cgroup v1 files, which is a way out.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hpcrl.errors import EnvironmentFault, UserError
from hpcrl.sandbox.base import SandboxSpec
from hpcrl.sandbox.seccomp import profile
from hpcrl.sandbox.server import ENTRY, ENTRY_BELOW_INIT
from hpcrl.sandbox.shell import ShellSandbox

__all__ = ["FLAGS", "ApptainerSandbox", "Bind", "exec_argv", "find_apptainer", "sandbox_owner"]

_WRITABLE = "--writable-tmpfs"

FLAGS = (
    "--userns",
    "--containall",
    "--cleanenv",
    "--no-home",
    "--no-privs",
    "--no-eval",
    "--net",
    "--network=none",
    _WRITABLE,
    "--hostname=sandbox",
    "--no-mount=sys,bind-paths",
)

_PLAIN_PATH = re.compile(r"/[^,:\"\\\n]*")


class Bind(NamedTuple):
    """A host directory and where the container sees it."""

    source: Path
    target: str
    writable: bool


def find_apptainer() -> str:
    """Path of the program. Raises EnvironmentFault."""
    path = shutil.which("apptainer") or shutil.which("singularity")
    if path is None:
        raise EnvironmentFault(
            "Apptainer is not installed on this machine (no `apptainer` on PATH): run tools/install-apptainer as root, "
            "or load the site's module"
        )
    return path


def sandbox_owner() -> int | None:
    """The user id that sandbox files and processes get: None for the caller's own, `nobody` when the caller is root."""
    return pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else None


def exec_argv(
    apptainer: str,
    image: Path,
    binds: Sequence[Bind],
    workdir: str,
    owner: int | None,
    seccomp: Path,
    guarded: bool = False,
) -> list[str]:
    """The command line; ``guarded``: see SandboxSpec. Raises UserError for a path that Apptainer's bind syntax cannot express."""
    flags = [flag for flag in FLAGS if flag != _WRITABLE] + ["--no-init"] if guarded else FLAGS
    argv = [apptainer, "--silent", "--nocolor", "exec", *flags, f"--pwd={workdir}", f"--security=seccomp:{seccomp}"]
    for bind in binds:
        for path in (str(bind.source), bind.target):
            if not _PLAIN_PATH.fullmatch(path):
                raise UserError(
                    f"{path!r} cannot be mounted: it must be absolute, without comma, colon, quote or backslash"
                )
        argv.append(f"--bind={bind.source}:{bind.target}:{'rw' if bind.writable else 'ro'}")
    argv += [str(image), *(ENTRY_BELOW_INIT if guarded else ENTRY)]
    if owner is not None:
        argv = ["setpriv", f"--reuid={owner}", f"--regid={owner}", "--clear-groups", "--", *argv]
    return argv


class ApptainerSandbox(ShellSandbox):
    """See ShellSandbox."""

    def __init__(self, spec: SandboxSpec, attempt: Path, apptainer: str, owner: int | None) -> None:
        super().__init__(spec, attempt, owner)
        self._apptainer = apptainer
        self._owner = owner
        # In the attempt's own directory: the package may lie where user nobody cannot read.
        self._seccomp = attempt / "seccomp.json"

    def _prepare(self, spec: SandboxSpec) -> None:
        super()._prepare(spec)
        self._seccomp.write_text(profile())
        self._seccomp.chmod(0o644)

    def _argv(self) -> list[str]:
        spec = self.spec
        if spec.image is None:
            raise UserError("the apptainer backend needs an image")
        binds = [Bind(self._work.work, spec.workdir, True), Bind(self._work.shm, "/dev/shm", True)]
        binds += [Bind(self._work.mount(i), mount.target, mount.writable) for i, mount in enumerate(spec.mounts)]
        return exec_argv(
            self._apptainer, spec.image, binds, spec.workdir, self._owner, self._seccomp, guarded=spec.guarded
        )

    def _environment(self) -> Mapping[str, str]:
        # HOME must not exist: no configuration of the user takes part.
        return {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/nonexistent", "LANG": "C.UTF-8"}
