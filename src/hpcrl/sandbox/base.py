"""What every sandbox backend offers, and what it promises.

    async with backend.create(spec) as sandbox:          # start() … stop()
        result = await sandbox.run("ls", timeout_s=5)    # one command at a time, each in a fresh shell in the work directory
        artifact = await sandbox.artifact()              # ends the sandbox's processes, then packs the changed files

Failures are typed here, once, at the boundary:

    InfraError("sandbox_start")      the container did not come up
    InfraError("sandbox_killed")     something outside killed it (out-of-memory killer, administrator)
    PolicyError("sandbox_dead")      the agent killed its own sandbox or broke its command server
    PolicyError("command_timeout")   a command could be ended only by ending the sandbox
    PolicyError("attempt_timeout")   the time given by ``end_after`` is over
    PolicyError("disk_limit" | "memory_limit" | "process_limit" | "artifact_limit")

A command that merely overruns its time is killed alone and reported as ``timed_out``; the sandbox goes on. After any of the errors
above the sandbox is dead; ``artifact()`` still works, so that the attempt is scored as it stands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from hpcrl.sandbox.limits import Limits

__all__ = ["CommandResult", "Mount", "Sandbox", "SandboxSpec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult:
    """Example: ``CommandResult(exit_code=0, output="sol.py\\n", timed_out=False, truncated=False, duration_s=0.001)``.

    ``output`` is standard output and error in the order written, bytes that are not UTF-8 replaced. ``exit_code`` follows the
    shell: 128 + signal number for a killed command. ``flooded``: it was killed for printing too much.
    """

    exit_code: int
    output: str
    timed_out: bool
    truncated: bool
    duration_s: float
    flooded: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """A directory shown inside the sandbox besides the work directory: a private copy of ``source``, or an empty one for None.

    Example: ``Mount(target="/tests", source=task_dir / "tests")``.
    """

    target: str
    source: Path | None = None
    writable: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxSpec:
    """What a sandbox is made of.

    ``files`` are directories whose content is copied, in order, into the work directory, after the image's own content at
    ``workdir``; ``artifact`` is applied to that before the sandbox starts, and counts as initial content.
    """

    image: Path | None
    """Unpacked image directory (see images.resolve); None only for the unsafe process backend."""
    workdir: str = "/work"
    files: tuple[Path, ...] = ()
    mounts: tuple[Mount, ...] = ()
    artifact: bytes | None = None
    env: dict[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    guarded: bool = False
    """For tests that run untrusted code beside them. The image is read-only, for its owner too: the tests' programs stay what they are.
    Processes that came loose stay, dead, for ``Sandbox.detached`` to see; each counts as one of the sandbox's processes."""


class Sandbox(ABC):
    """One attempt's isolated place. Not reusable: a retry is a new sandbox."""

    spec: SandboxSpec

    @abstractmethod
    async def start(self) -> None:
        """Prepare the work directory and start the command server.

        Raises InfraError("sandbox_start"), DataError("artifact_corrupt"), or UserError for a spec that cannot be used.
        """

    @abstractmethod
    async def run(self, command: str, timeout_s: float | None = None) -> CommandResult:
        """Run one shell command in the work directory; returns by its deadline (plus at most two seconds) whatever it does.

        Commands share files but no shell state. Background processes live on until the sandbox ends; what they print later
        appears in a later command's output. Raises PolicyError or InfraError as listed in the module's docstring.
        """

    @abstractmethod
    async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """The first ``max_bytes`` of a regular file in the work directory (relative or absolute path).

        Raises FileNotFoundError, PermissionError or ValueError (outside the work directory, or reached through a link).
        """

    @abstractmethod
    async def write(self, path: str, content: bytes) -> None:
        """Create or replace a regular file in the work directory, with missing parent directories. Raises as ``read``."""

    @abstractmethod
    async def read_mount(self, target: str, path: str, max_bytes: int = 1 << 20) -> bytes:
        """As ``read``, below the mount at ``target``; also after the sandbox has died."""

    @abstractmethod
    async def locked(self, target: str, names: tuple[str, ...]) -> bool:
        """Whether modes keep what runs inside from writing to one of these files of the mount at ``target``, or from making it.
        Raises ValueError, OSError.
        """

    @abstractmethod
    async def detached(self) -> bool:
        """Whether anything but the commands' own line of processes has run: a process that outlived the one that started it,
        though it may have ended since, or that runs now. After a command, False means that nothing wrote after it had ended, nor
        behind its back. A sandbox that has died gives True. The unsafe backend sees only what its commands have not orphaned.
        """

    @abstractmethod
    def end_after(self, seconds: float) -> None:
        """The started sandbox may live for so long from now; then it dies with PolicyError("attempt_timeout"), command or none."""

    @abstractmethod
    async def finish(self) -> None:
        """End the sandbox's processes, so that its files are at rest. May be called again; no command can follow."""

    @abstractmethod
    async def artifact(self) -> bytes:
        """End the sandbox's processes and pack what changed in the work directory (see artifact.py); equal changes, equal bytes.

        Raises PolicyError("artifact_limit").
        """

    @abstractmethod
    async def stop(self) -> None:
        """End all processes and remove the scratch files. May be called at any time, also twice."""

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
