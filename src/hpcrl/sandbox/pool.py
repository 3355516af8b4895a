"""The sandboxes of one worker process: scratch space, bounded starts, leftovers.

    async with SandboxPool(backend="apptainer", start_concurrency=4) as pool:      # sweeps what dead workers left
        async with pool.sandbox(spec, name=attempt_id) as sandbox:                 # waits for a start slot, starts; stops at the end
            …

Starting costs about 50 ms of CPU: more starts at once than cores only makes each of them slower. Live sandboxes are not bounded
here: the worker's own concurrency does that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from hpcrl.errors import UserError
from hpcrl.sandbox.apptainer import ApptainerSandbox, find_apptainer, sandbox_owner
from hpcrl.sandbox.base import Sandbox, SandboxSpec
from hpcrl.sandbox.process import ProcessSandbox
from hpcrl.sandbox.sweep import WorkerScratch, default_base, sweep

__all__ = ["Backend", "SandboxPool"]

Backend = Literal["apptainer", "process"]


class SandboxPool:
    """``scratch``: node-local directory for all workers of this user (default: sweep.default_base). Counters are cumulative."""

    def __init__(self, *, backend: Backend, start_concurrency: int, scratch: Path | None = None) -> None:
        if start_concurrency < 1:
            raise UserError(f"start_concurrency is {start_concurrency}: it must be at least 1")
        self._backend = backend
        self._base = scratch if scratch is not None else default_base()
        self._starts = asyncio.Semaphore(start_concurrency)
        self._scratch: WorkerScratch | None = None
        self._apptainer = ""
        self._owner: int | None = None
        self._live: set[Sandbox] = set()
        self.started = 0
        self.start_failures = 0
        self.start_seconds = 0.0

    async def __aenter__(self) -> Self:
        """Raises EnvironmentFault when sandboxes cannot run here."""
        if self._backend == "apptainer":
            self._apptainer = find_apptainer()
            self._owner = sandbox_owner()
        await asyncio.to_thread(sweep, self._base)
        self._scratch = WorkerScratch(self._base, self._owner)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._scratch is not None:
            await asyncio.gather(*(sandbox.stop() for sandbox in self._live))
            await asyncio.to_thread(self._scratch.close)
            self._scratch = None

    @property
    def isolated(self) -> bool:
        """Whether sandboxes have namespaces of their own, so that mounts stand at their targets."""
        return self._backend != "process"

    def create(self, spec: SandboxSpec, name: str = "attempt") -> Sandbox:
        """A sandbox that was not started; the caller starts and stops it."""
        if self._scratch is None:
            raise UserError("the sandbox pool is not open: use `async with`")
        attempt = self._scratch.new_attempt(name)
        if self._backend == "process":
            return ProcessSandbox(spec, attempt)
        return ApptainerSandbox(spec, attempt, self._apptainer, self._owner)

    @asynccontextmanager
    async def sandbox(self, spec: SandboxSpec, name: str = "attempt") -> AsyncIterator[Sandbox]:
        """A started sandbox. Raises what Sandbox.start raises."""
        sandbox = self.create(spec, name)
        self._live.add(sandbox)
        try:
            async with self._starts:
                began = time.monotonic()
                try:
                    await sandbox.start()
                except BaseException:
                    self.start_failures += 1
                    raise
                self.started += 1
                self.start_seconds += time.monotonic() - began
            yield sandbox
        finally:
            await sandbox.stop()
            self._live.discard(sandbox)
