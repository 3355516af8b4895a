"""The sandboxes of one worker process: scratch space, bounded starts, sandboxes started ahead, leftovers.

    async with SandboxPool(backend="apptainer", start_concurrency=4, warm=8) as pool:   # sweeps what dead workers left
        async with pool.sandbox(spec, name=attempt_id) as sandbox:                      # ready at once or started; stopped at the end
            …

    sandbox(spec) ──► oldest of its kind on the shelf (one still starting is waited for) ──► take(spec) ─► the attempt's, for good
                 └──► none there, or it failed: a start of its own, in its turn
    keeper        woken by each of these and every second: dead ones off the shelves; as many as warm.py wants, at most ``warm`` in
                  all, are started while a start slot is free; what is no longer wanted is stopped

Starting costs about 50 ms of CPU: more starts at once than cores only makes each of them slower. Live sandboxes are not bounded
here: the worker's own concurrency does that. A sandbox serves one attempt and never returns to a shelf. A start ahead that fails is
logged and tried again later; an attempt fails only by a start of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from hpcrl.errors import HpcrlError, InfraError, UserError
from hpcrl.sandbox.apptainer import ApptainerSandbox, find_apptainer, sandbox_owner
from hpcrl.sandbox.base import Sandbox, SandboxSpec
from hpcrl.sandbox.process import ProcessSandbox
from hpcrl.sandbox.shell import ShellSandbox
from hpcrl.sandbox.sweep import WorkerScratch, default_base, sweep
from hpcrl.sandbox.warm import Kind, Shelf, kind_of, shares

__all__ = ["Backend", "SandboxPool"]

log = logging.getLogger(__name__)

Backend = Literal["apptainer", "process"]

_TICK_S = 1.0
_RETRY_S = 5.0


class SandboxPool:
    """``warm``: sandboxes started ahead, at most; 0: none. ``scratch``: node-local directory for all workers of this user (default:
    sweep.default_base). Counters are cumulative; ``started`` counts those started ahead too, ``taken`` those that became an attempt's;
    ``missed`` are attempts that wanted one started ahead and found none. Without ``warm`` both stay 0.
    """

    def __init__(self, *, backend: Backend, start_concurrency: int, warm: int = 0, scratch: Path | None = None) -> None:
        if start_concurrency < 1:
            raise UserError(f"start_concurrency is {start_concurrency}: it must be at least 1")
        if warm < 0:
            raise UserError(f"warm is {warm}: it must be 0 (none started ahead) or more")
        self._backend = backend
        self._base = scratch if scratch is not None else default_base()
        self._starts = asyncio.Semaphore(start_concurrency)
        self._warm = warm
        self._scratch: WorkerScratch | None = None
        self._apptainer = ""
        self._owner: int | None = None
        self._live: set[ShellSandbox] = set()
        self._shelves: dict[Kind, Shelf] = {}
        self._wake = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self.started = 0
        self.start_failures = 0
        self.start_seconds = 0.0
        self.taken = 0
        self.missed = 0

    async def __aenter__(self) -> Self:
        """Raises EnvironmentFault when sandboxes cannot run here."""
        if self._backend == "apptainer":
            self._apptainer = find_apptainer()
            self._owner = sandbox_owner()
        await asyncio.to_thread(sweep, self._base)
        self._scratch = WorkerScratch(self._base, self._owner)
        if self._warm:
            self._keeper = asyncio.create_task(self._keep(), name="sandbox keeper")
            self._keeper.add_done_callback(_told)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._scratch is None:
            return
        starting = [task for shelf in self._shelves.values() for task in shelf.members]
        for task in (*starting, *filter(None, [self._keeper])):
            task.cancel()
        await asyncio.gather(*starting, *filter(None, [self._keeper]), return_exceptions=True)
        await asyncio.gather(*(sandbox.stop() for sandbox in self._live))
        await asyncio.to_thread(self._scratch.close)
        self._scratch = None

    @property
    def isolated(self) -> bool:
        """Whether sandboxes have namespaces of their own, so that mounts stand at their targets."""
        return self._backend != "process"

    def ready(self) -> int:
        """Sandboxes that stand ready now."""
        tasks = [task for shelf in self._shelves.values() for task in shelf.members if task.done()]
        return sum(not task.cancelled() and task.exception() is None and task.result().alive for task in tasks)

    def create(self, spec: SandboxSpec, name: str = "attempt") -> ShellSandbox:
        """A sandbox that was not started; the caller starts and stops it."""
        if self._scratch is None:
            raise UserError("the sandbox pool is not open: use `async with`")
        attempt = self._scratch.new_attempt(name)
        if self._backend == "process":
            return ProcessSandbox(spec, attempt)
        return ApptainerSandbox(spec, attempt, self._apptainer, self._owner)

    @asynccontextmanager
    async def sandbox(self, spec: SandboxSpec, name: str = "attempt") -> AsyncIterator[Sandbox]:
        """A started sandbox. Raises what Sandbox.start raises. ``name`` is for the scratch directory of one not started ahead."""
        sandbox = await self._from_shelf(spec) if self._warm else None
        if sandbox is None:
            self.missed += bool(self._warm)
            sandbox = self.create(spec, name)
            await self._bring_up(sandbox, sandbox.start)
        try:
            yield sandbox
        finally:
            await self._stop(sandbox)

    async def _bring_up(self, sandbox: ShellSandbox, start: Callable[[], Awaitable[None]]) -> None:
        """Start it in its turn; on failure it is stopped."""
        self._live.add(sandbox)
        try:
            async with self._starts:
                began = time.monotonic()
                await start()
                self.started += 1
                self.start_seconds += time.monotonic() - began
        except BaseException:
            self.start_failures += 1
            await self._stop(sandbox)
            raise
        finally:
            self._wake.set()  # a start slot is free

    async def _stop(self, sandbox: ShellSandbox) -> None:
        await sandbox.stop()
        self._live.discard(sandbox)

    # ---------------------------------------------------------------- started ahead

    async def _from_shelf(self, spec: SandboxSpec) -> ShellSandbox | None:
        kind = kind_of(spec)
        shelf = self._shelves.get(kind)
        if shelf is None:
            shelf = self._shelves[kind] = Shelf(kind.spec(spec))
        shelf.demand.arrived(time.monotonic())
        self._wake.set()
        while shelf.members:
            member = shelf.members.popleft()
            try:
                sandbox = await member
            except HpcrlError:  # told by _ahead
                continue
            except asyncio.CancelledError:
                await self._give_up(member)
                raise
            try:
                await sandbox.take(spec)
                self.taken += 1
                return sandbox
            except InfraError as error:
                log.warning("a sandbox started ahead cannot be used: %s", error)
                await self._stop(sandbox)
            except BaseException:
                await self._stop(sandbox)
                raise
        return None

    async def _keep(self) -> None:
        while True:
            now = time.monotonic()
            shelves = sorted(self._shelves.values(), key=lambda shelf: -shelf.demand.last)
            wanted = [shelf.demand.wanted(now) for shelf in shelves]
            for shelf, number in zip(shelves, shares(wanted, self._warm), strict=True):
                for dead in shelf.drop_dead():
                    log.warning("a sandbox started ahead has died; another takes its place")
                    await self._stop(dead)
                while len(shelf.members) > number:
                    await self._give_up(shelf.members.pop())
                while len(shelf.members) < number and now >= shelf.retry_at and not self._starts.locked():
                    shelf.members.append(asyncio.create_task(self._ahead(shelf)))
                    await asyncio.sleep(0)  # it takes its start slot
            self._shelves = {k: s for k, s in self._shelves.items() if s.members or s.demand.wanted(now)}
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._wake.wait()
            self._wake.clear()

    async def _ahead(self, shelf: Shelf) -> ShellSandbox:
        began = time.monotonic()
        sandbox = self.create(shelf.spec, "ahead")
        try:
            await self._bring_up(sandbox, sandbox.boot)
        except HpcrlError as error:
            log.warning("a sandbox could not be started ahead: %s", error)
            shelf.retry_at = time.monotonic() + _RETRY_S
            raise
        shelf.demand.started(time.monotonic() - began)
        return sandbox

    async def _give_up(self, member: asyncio.Task[ShellSandbox]) -> None:
        member.cancel()
        await asyncio.wait([member])
        if not member.cancelled() and member.exception() is None:
            await self._stop(member.result())


def _told(keeper: asyncio.Task[None]) -> None:
    """Without its keeper a pool only becomes slow: that must be seen."""
    if not keeper.cancelled() and keeper.exception() is not None:
        log.error("no more sandboxes are started ahead", exc_info=keeper.exception())
