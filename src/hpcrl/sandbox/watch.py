"""The watch over one sandbox: looks about once a second, also while no command runs, whether it keeps its limits.

    tick ─► anything running, or ran since the last look?  no ─► next tick
              └─ yes ─► work directory, memory, processes ─► within the limits ─► next tick (later, if looking was slow)
                                                          └► broken ─► PolicyError, returned; the sandbox is then ended
    the attempt's own time is over ─► the same

What the kernel bounds at once (ulimit, a cgroup where there is one) is not its business; disk always is.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time

from hpcrl.errors import PolicyError
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.procs import children, descendants, files_in_memory, memory_bytes, unnamed_bytes
from hpcrl.sandbox.workdir import WorkDir

__all__ = ["UsageWatch"]

log = logging.getLogger(__name__)

_TICK_S = 1.0
_SHARE = 20
"""A large work directory must not cost more than a twentieth of a core."""


class UsageWatch:
    """``init`` and ``server``: the sandbox's first process and its command server, as the host numbers them. ``contained``: it has a
    /tmp of its own."""

    def __init__(self, limits: Limits, work: WorkDir, init: int, server: int, contained: bool) -> None:
        self._limits = limits
        self._work = work
        self._init, self._server, self._contained = init, server, contained
        self._ran = False
        self._over_at = math.inf
        self._sooner = asyncio.Event()

    def command_began(self) -> None:
        """What a command leaves is looked at even if it ends before the next tick."""
        self._ran = True

    def end_after(self, seconds: float) -> None:
        """The sandbox may live for so long from now."""
        self._over_at = time.monotonic() + seconds
        self._sooner.set()

    async def broken(self) -> PolicyError:
        """Returns when a limit is broken; to be cancelled when the sandbox ends for another reason."""
        pause = _TICK_S
        while True:
            left = self._over_at - time.monotonic()
            if left <= 0:
                return PolicyError("attempt_timeout", "the attempt's own time is over")
            self._sooner.clear()
            try:
                async with asyncio.timeout(min(pause, left)):
                    await self._sooner.wait()
                continue  # a new end
            except TimeoutError:
                pass
            began = time.monotonic()
            try:
                await self._look()
            except PolicyError as error:
                return error
            except OSError as error:  # the node's trouble, such as too many open files: the next look may succeed
                log.warning("a sandbox could not be looked at: %s", error)
            pause = max(_TICK_S, _SHARE * (time.monotonic() - began))

    async def _look(self) -> None:
        idle = children(self._server) == [] and children(self._init) in ([], [self._server])
        if idle and not self._ran:
            return
        self._ran = not idle
        await asyncio.to_thread(self._check)

    def _check(self) -> None:
        limits = self._limits
        pids = descendants(self._init)
        self._work.check_usage(limits, self._unnamed(pids))
        if len(pids) > 2 * limits.processes:
            raise PolicyError("process_limit", f"{len(pids)} processes; allowed {limits.processes}")
        if memory_bytes(pids) > limits.memory_bytes:
            raise PolicyError("memory_limit", f"the sandbox holds more than {limits.memory_bytes} bytes of memory")
        if self._contained and files_in_memory(self._init) > limits.disk_entries:
            raise PolicyError("disk_limit", f"/tmp and the writable layer hold more than {limits.disk_entries} files")

    def _unnamed(self, pids: list[int]) -> int:
        """Bytes on disk that no walk through the directories finds. Those in /tmp are bounded by its size."""
        if not self._contained:
            return 0
        try:
            memory = os.stat(f"/proc/{self._init}/root/tmp").st_dev
        except OSError:  # it has ended
            return 0
        return unnamed_bytes(pids, memory)
