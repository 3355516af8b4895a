"""Can sandboxes run on this machine? One real start answers, with one line that says what is wrong."""

from __future__ import annotations

import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from hpcrl.errors import EnvironmentFault, HpcrlError
from hpcrl.sandbox.apptainer import find_apptainer, sandbox_owner
from hpcrl.sandbox.base import SandboxSpec
from hpcrl.sandbox.cgroup import NotDelegated, delegated
from hpcrl.sandbox.images import Image
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.pool import Backend, SandboxPool

__all__ = ["Gap", "gaps", "preflight"]

_CHECKS = (
    ("test ! -e /sys/class/net", "/sys is visible inside"),
    ("test -w .", "the work directory cannot be written"),
    ("! test -w /proc/sys/kernel/core_pattern", "/proc/sys can be written from inside"),
    ('test "$(ls /proc | grep -c "^[0-9]*$")" -lt 12', "foreign processes are visible inside"),
)

_FILTERED = 'grep -q "^Seccomp:[[:space:]]*2" /proc/self/status'


@dataclass(frozen=True, slots=True)
class Gap:
    """A bound that this machine does not give. ``late``: it is kept, but only about a second after it was broken."""

    what: str
    remedy: str
    late: bool = False


_UNFILTERED = Gap(
    "system calls are not filtered: user namespaces and memory outside of processes are open to an agent",
    "an Apptainer built with libseccomp",
)


def gaps() -> list[Gap]:
    """What this machine does not enforce, as far as it can be seen from outside a sandbox; see docs/security.md."""
    found = []
    try:
        delegated()
    except NotDelegated as error:
        found.append(
            Gap(
                "kernel memory of a sandbox (socket buffers) is not bounded, all its memory together only once a second: "
                f"no cgroup of its own, for {error}",
                "have a cgroup (v2) with memory and pids delegated to the job (docs/security.md)",
            )
        )
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    try:
        traced = int(scope.read_text()) == 0
    except (OSError, ValueError):
        traced = True
    if traced:
        found.append(Gap("tested code may trace its tests", "sysctl kernel.yama.ptrace_scope=1"))
    found.append(
        Gap("disk is bounded once a second, not at once", "a project quota on the scratch directory", late=True)
    )
    return found


async def preflight(
    image: Image | None,
    backend: Backend = "apptainer",
    scratch: Path | None = None,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    strict: bool = False,
) -> list[Gap]:
    """Start one sandbox under ``limits`` and look at it from inside; returns what is not enforced.

    Raises EnvironmentFault with the cause and the remedy; ``strict``: also for a gap, unless it is merely late.
    """
    if backend == "process":
        found = [Gap("the process backend enforces and isolates nothing", "set sandbox.backend: apptainer")]
    else:
        found = [*gaps(), *await _try_one(image, backend, scratch, limits)]
    refused = [gap for gap in found if not gap.late]
    if strict and refused:
        reasons = "; ".join(f"{gap.what} (remedy: {gap.remedy})" for gap in refused)
        raise EnvironmentFault(
            f"limits.strict: not enforced on {socket.gethostname()}: {reasons}; or set limits.strict: false"
        )
    return found


async def _try_one(image: Image | None, backend: Backend, scratch: Path | None, limits: Limits) -> list[Gap]:
    _static_checks()
    if image is None:
        raise EnvironmentFault("no sandbox image: set sandbox.image")
    spec = SandboxSpec(image=image.path, limits=limits)
    try:
        async with (
            SandboxPool(backend=backend, start_concurrency=1, scratch=scratch) as pool,
            pool.sandbox(spec, "preflight") as sandbox,
        ):
            for command, fault in _CHECKS:
                result = await sandbox.run(command, timeout_s=20.0)
                if result.exit_code != 0:
                    raise EnvironmentFault(
                        f"sandboxes do not isolate on this machine: {fault} ({result.output.strip()})"
                    )
            filtered = await sandbox.run(_FILTERED, timeout_s=20.0)
    except EnvironmentFault:
        raise
    except HpcrlError as error:
        hint = _hint(str(error), image)
        raise EnvironmentFault(f"a sandbox cannot be started from {image.path}: {error}{hint}") from error
    return [] if filtered.exit_code == 0 else [_UNFILTERED]


def _static_checks() -> None:
    find_apptainer()
    limit = Path("/proc/sys/user/max_user_namespaces")
    clone = Path("/proc/sys/kernel/unprivileged_userns_clone")
    if limit.exists() and int(limit.read_text()) == 0:
        raise EnvironmentFault(f"user namespaces are switched off ({limit} is 0): ask the administrators to allow them")
    if clone.exists() and int(clone.read_text()) == 0:
        raise EnvironmentFault(f"unprivileged user namespaces are switched off ({clone} is 0): ask the administrators")
    if (
        not Path("/proc/self/task/self/children").exists()
        and not Path(f"/proc/self/task/{os.getpid()}/children").exists()
    ):
        raise EnvironmentFault(
            "this kernel has no /proc/PID/task/TID/children (CONFIG_PROC_CHILDREN), which sandboxes need"
        )
    if sandbox_owner() is not None and shutil.which("setpriv") is None:
        raise EnvironmentFault("run as root, sandboxes need `setpriv` (package util-linux) to become an ordinary user")


def _hint(message: str, image: Image) -> str:
    if "ermission denied" not in message and "no such file" not in message.lower():
        return ""
    if sandbox_owner() is not None:
        return (
            f"; run as root, sandboxes are user nobody: every directory above {image.path} must be passable to others"
        )
    return "; is the image readable to you?"
