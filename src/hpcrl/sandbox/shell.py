"""A sandbox driven through a command server (server.py): all backends but their argv.

start   scratch directories ─┬─► spawn ─► "ready" ─► find init and server among the process's children ─┬─► setup ─► "0 0"
                             └─► a thread: content of image, task and artifact into the work directory ──┘
boot    the same without attempt: only the image's content, no setup. The sandbox then waits, and ``take(spec)`` makes it the attempt's
        own: files, artifact, mounts' content, setup
run     send ─► status
        deadline ─► kill the command's process group and descendants ─► status within half a second, or
                 ─► kill everything but the server                   ─► status within half a second, or
                 ─► kill the sandbox, PolicyError("command_timeout")
watch   beside all that, watch.py: a broken limit kills init
stop    kill init (its PID namespace dies with it) ─► reap ─► remove scratch
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hpcrl.errors import HpcrlError, InfraError, PolicyError
from hpcrl.sandbox.base import CommandResult, Sandbox, SandboxSpec
from hpcrl.sandbox.cgroup import SandboxCgroup, available
from hpcrl.sandbox.channel import Channel, Died, Flooded
from hpcrl.sandbox.procs import children, descendants, kill_all, reaped_faults, session
from hpcrl.sandbox.server import setup
from hpcrl.sandbox.watch import UsageWatch
from hpcrl.sandbox.workdir import WorkDir

__all__ = ["ShellSandbox"]

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_GRACE_S = 0.5
_REAP_S = 5.0


class ShellSandbox(Sandbox):
    """``attempt`` is a directory to be created for this sandbox alone; ``owner`` the id its files belong to (None: the caller's)."""

    contained = True
    """Whether the started process has a PID namespace below it, whose init takes everything with it."""

    def __init__(self, spec: SandboxSpec, attempt: Path, owner: int | None) -> None:
        self.spec = spec
        self._work = WorkDir(attempt, self._visible_workdir(spec, attempt), owner)
        self._channel = Channel(spec.limits.output_bytes, spec.limits.output_flood_bytes)
        self._init = self._server = 0
        self._reaped = 0
        self._dead: HpcrlError | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._thread: asyncio.Task[Any] | None = None
        self._watch: UsageWatch | None = None
        self._watching: asyncio.Task[None] | None = None
        parent = available()
        self._cgroup = SandboxCgroup(parent, attempt) if parent is not None else None

    # What a backend defines.

    def _argv(self) -> list[str]:
        raise NotImplementedError

    def _environment(self) -> Mapping[str, str]:
        raise NotImplementedError

    def _visible_workdir(self, spec: SandboxSpec, attempt: Path) -> str:
        """Where commands see the work directory."""
        return spec.workdir

    # Life.

    @property
    def alive(self) -> bool:
        """Whether its container runs."""
        return self._dead is None and self._channel.alive

    async def start(self) -> None:
        await self._launch(self._populate)
        await self._configure()

    async def boot(self) -> None:
        """Start the container for an attempt that ``take`` names later. Of the spec it needs image, workdir, mounts and limits.

        Raises as ``start``.
        """
        await self._launch(self._work.add_image)

    async def take(self, spec: SandboxSpec) -> None:
        """Make a booted sandbox that of ``spec``, of the same kind (warm.py). Raises as ``start``."""
        self.spec = spec
        self._channel.limit(spec.limits.output_bytes, spec.limits.output_flood_bytes)
        await self._preparing(self._receive)
        await self._configure()

    async def _launch(self, populate: Callable[[SandboxSpec], None]) -> None:
        """Start the container and, meanwhile, ``populate`` the work directory: nothing of an attempt runs yet."""
        await self._preparing(self._prepare)
        populating = asyncio.create_task(self._preparing(populate))
        try:
            await self._spawn()
            await populating
        finally:
            populating.cancel()  # the thread itself is waited for by stop()
            await asyncio.gather(populating, return_exceptions=True)

    async def _spawn(self) -> None:
        argv = self._argv() if self._cgroup is None else self._cgroup.argv(self._argv())
        try:
            async with asyncio.timeout(self.spec.limits.start_timeout_s):
                await self._channel.spawn(argv, self._environment(), Path("/"))
        except TimeoutError:
            limit = self.spec.limits.start_timeout_s
            raise InfraError("sandbox_start", f"not ready within {limit:g} s; {self._channel.diagnostics}") from None
        except Died as error:
            text = error.diagnostics or f"the container ended at once with status {error.returncode}"
            raise InfraError("sandbox_start", text) from error
        except OSError as error:
            raise InfraError("sandbox_start", f"{argv[0]}: {error.strerror}") from error
        self._locate()

    async def _configure(self) -> None:
        variables = {"HOME": "/tmp", "LANG": "C.UTF-8", **self.spec.env}
        script = setup(str(self._work.target), variables, self.spec.limits)
        try:
            async with asyncio.timeout(self.spec.limits.start_timeout_s):
                status = await self._channel.configure(script)
        except TimeoutError:
            raise InfraError("sandbox_start", "the command server does not answer") from None
        except Died as error:
            raise InfraError("sandbox_start", f"the container ended with status {error.returncode}") from error
        if status != 0:
            raise InfraError("sandbox_start", f"{self._work.target} cannot be entered inside the sandbox")
        self._reaped = reaped_faults(self._init)
        self._watch = UsageWatch(self.spec.limits, self._work, self._init, self._server, self.contained)
        self._watching = asyncio.create_task(self._end_when_broken(self._watch))

    def _prepare(self, spec: SandboxSpec) -> None:
        """What must be there before the container starts. Raises OSError."""
        self._work.create(spec)
        if self._cgroup is not None:
            self._cgroup.create(spec.limits)

    def _receive(self, spec: SandboxSpec) -> None:
        """What makes a booted sandbox the attempt's own. Raises OSError."""
        if self._cgroup is not None:
            self._cgroup.bound(spec.limits)
        self._work.add_attempt(spec)

    def _populate(self, spec: SandboxSpec) -> None:
        self._work.add_image(spec)
        self._work.add_attempt(spec)

    async def _preparing(self, work: Callable[[SandboxSpec], None]) -> None:
        try:
            await self._in_thread(work, self.spec)
        except OSError as error:
            raise InfraError("sandbox_start", f"cannot prepare the sandbox's directories: {error}") from error

    async def _in_thread(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """Blocking work on the scratch files. ``stop`` waits for it: a caller that is cancelled leaves no thread behind in them."""
        if self._thread is not None:
            await asyncio.wait([self._thread])
        self._thread = asyncio.create_task(asyncio.to_thread(work, *arguments))
        return await asyncio.shield(self._thread)

    def _locate(self) -> None:
        if not self.contained:
            self._init = self._server = self._channel.pid
            return
        below = children(self._channel.pid)
        servers = children(below[0]) if len(below) == 1 else []
        if len(servers) != 1:
            raise InfraError("sandbox_start", f"unexpected process tree below {self._channel.pid}: {below} {servers}")
        self._init, self._server = below[0], servers[0]

    # Commands.

    async def run(self, command: str, timeout_s: float | None = None) -> CommandResult:
        if self._dead is not None:
            raise self._dead
        limits = self.spec.limits
        refused = _refuse(command, limits.command_bytes)
        if refused is not None:
            return refused
        if self._watch is not None:
            self._watch.command_began()
        started = time.monotonic()
        deadline = started + (limits.command_timeout_s if timeout_s is None else timeout_s)
        waiting, output = self._channel.begin(command)
        try:
            status, timed_out, flooded = await self._outcome(waiting, deadline)
        except Died as error:
            raise await self._fail(self._dead or self._cause(error)) from error
        except PolicyError as error:
            raise await self._fail(error) from None
        except asyncio.CancelledError:
            self._dead = InfraError("sandbox_killed", "a command was cancelled")
            self._kill()
            raise
        finally:
            self._channel.finish()
        if self._dead is not None:
            # Ended meanwhile: the server may have had the time to report its command's death.
            raise await self._fail(self._dead)
        note = f"\n[killed: more than {limits.output_flood_bytes} bytes of output]" if flooded else ""
        return CommandResult(
            exit_code=status,
            output=output.text() + note,
            timed_out=timed_out,
            truncated=output.truncated,
            duration_s=time.monotonic() - started,
            flooded=flooded,
        )

    async def _outcome(self, waiting: asyncio.Future[int], deadline: float) -> tuple[int, bool, bool]:
        """Status, whether the deadline cut it short, whether a flood of output did. Raises Died, PolicyError."""
        try:
            done, _ = await asyncio.wait([waiting], timeout=max(0.0, deadline - time.monotonic()))
            if done:
                return waiting.result(), False, False
        except Flooded:
            return await self._cut_short(), False, True
        return await self._cut_short(), True, False

    async def _end_when_broken(self, watch: UsageWatch) -> None:
        error = await watch.broken()
        if self._dead is None:
            # A command in progress finds this as its cause.
            self._dead = error
            self._kill()

    def end_after(self, seconds: float) -> None:
        if self._watch is not None:
            self._watch.end_after(seconds)

    async def _cut_short(self) -> int:
        """End the command in progress; its status. Raises PolicyError after having ended the sandbox."""
        waiting = self._channel.rearm()
        for kill in (self._kill_command, self._kill_commands):
            kill()
            done, _ = await asyncio.wait([waiting], timeout=_GRACE_S)
            if done:
                return waiting.result()
        raise PolicyError("command_timeout", "a command could be ended only by ending the sandbox")

    def _kill_command(self) -> None:
        for child in children(self._server):
            try:
                group = os.getpgid(child)
                if group != os.getpgid(self._server):
                    os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                continue
        kill_all(descendants(self._server))

    def _kill_commands(self) -> None:
        kill_all([pid for pid in descendants(self._init) if pid != self._server])

    def _cause(self, error: Died) -> HpcrlError:
        """Who ended the sandbox. Nothing inside can signal the runtime process on the host, so its violent death came from outside."""
        broken = self._cgroup.broken_limit() if self._cgroup is not None else None
        if broken is not None:
            return broken
        if error.returncode < 0:
            name = signal.Signals(-error.returncode).name
            return InfraError("sandbox_killed", f"the container runtime was killed by {name}")
        text = f"the command server ended with status {error.returncode}; {error.diagnostics}"
        return PolicyError("sandbox_dead", text)

    async def _fail(self, error: HpcrlError) -> HpcrlError:
        self._dead = error
        await self._end()
        return error

    # Files.

    async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        return self._work.read(path, max_bytes)

    async def write(self, path: str, content: bytes) -> None:
        self._work.write(path, content)

    async def read_mount(self, target: str, path: str, max_bytes: int = 1 << 20) -> bytes:
        return self._work.read_mount(self._mount(target), path, max_bytes)

    async def locked(self, target: str, names: tuple[str, ...]) -> bool:
        return self._work.locked(self._mount(target), names)

    def _mount(self, target: str) -> int:
        for index, mount in enumerate(self.spec.mounts):
            if mount.target == target:
                return index
        raise ValueError(f"nothing is mounted at {target}")

    async def detached(self) -> bool:
        if self._dead is not None or not self._channel.alive:
            return True
        if not self.contained:
            return bool(descendants(self._server))
        # Orphans become init's children. The living are looked at first: one that ends meanwhile is then in the count.
        if children(self._init) != [self._server] or children(self._server):
            return True
        return reaped_faults(self._init) != self._reaped

    async def finish(self) -> None:
        if self._dead is None:
            self._dead = PolicyError("sandbox_dead", "the attempt has ended")
        await self._end()

    async def artifact(self) -> bytes:
        await self.finish()
        return await self._in_thread(self._work.artifact, self.spec.limits.artifact_bytes)

    # End.

    async def _end(self) -> None:
        """Kill all processes and reap them. May be called again."""
        if self._watching is not None:
            self._watching.cancel()
        self._kill()
        try:
            async with asyncio.timeout(_REAP_S):
                await self._channel.close()
        except TimeoutError:
            if self._channel.alive:
                kill_all([self._channel.pid])
            await self._channel.close()

    def _kill(self) -> None:
        if not self._channel.alive:
            return
        pid = self._channel.pid
        if self.contained:
            # Init rather than the runtime process: that one then reaps it and ends by itself. Without init, it is still starting.
            kill_all(children(pid) or [pid])
        else:
            kill_all([*descendants(pid), *session(pid)])

    async def stop(self) -> None:
        # Its own task, so that a cancelled caller cannot leave half of it undone.
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        if self._dead is None:
            self._dead = PolicyError("sandbox_dead", "the sandbox was stopped")
        await self._end()
        try:
            if self._cgroup is not None:
                await self._in_thread(self._cgroup.remove)
            await self._in_thread(self._work.remove)
        except OSError as error:
            # The pool's end, or the next sweep, tries again; the attempt's result does not depend on it.
            log.warning("%s cannot be removed: %s", self._work.attempt, error)


def _refuse(command: str, max_bytes: int) -> CommandResult | None:
    """The answer a shell would give to a command that cannot be passed to one."""
    if "\0" in command:
        text = "the command contains a NUL character"
    elif not _encodable(command):
        text = "the command contains half of a surrogate pair, which is no character"
    elif len(shlex.quote(command).encode("utf-8", "surrogateescape")) > max_bytes:
        text = f"the command is longer than {max_bytes} bytes"
    else:
        return None
    return CommandResult(exit_code=126, output=text + "\n", timed_out=False, truncated=False, duration_s=0.0)


def _encodable(command: str) -> bool:
    try:
        command.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True
