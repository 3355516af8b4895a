"""UNSAFE: commands run as plain processes of the caller, isolated from nothing. For hpcrl's own tests, never for an agent.

It shares everything with the real backend but the container: same command server, limits, work directory and artifact. Absolute
paths differ: the work directory is the host's scratch path, also in ``$HPCRL_WORKDIR``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hpcrl.sandbox.base import SandboxSpec
from hpcrl.sandbox.server import ENTRY
from hpcrl.sandbox.shell import ShellSandbox

__all__ = ["ProcessSandbox"]


class ProcessSandbox(ShellSandbox):
    """Isolates nothing. Mounts are announced as ``$HPCRL_MOUNT_0``, ``$HPCRL_MOUNT_1``, …: there is no namespace to mount in."""

    contained = False

    def __init__(self, spec: SandboxSpec, attempt: Path) -> None:
        super().__init__(spec, attempt, owner=None)

    def _visible_workdir(self, spec: SandboxSpec, attempt: Path) -> str:
        return str(attempt / "work")

    def _argv(self) -> list[str]:
        return list(ENTRY)

    def _environment(self) -> Mapping[str, str]:
        mounts = {f"HPCRL_MOUNT_{index}": str(self._work.mount(index)) for index in range(len(self.spec.mounts))}
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "LANG": "C.UTF-8",
            "HPCRL_WORKDIR": str(self._work.work),
            **mounts,
        }
