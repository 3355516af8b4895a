"""The vLLM servers of one replica, whatever they serve: start, end, and how a broken one is replaced within a budget.

Two kinds: ``Engines`` (engines.py) load each version as a whole model, ``Adapters`` (adapters.py) keep one base model and load each
version as an adapter. No locking: the caller sees to it that one flip or replacement is under way at a time.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from hpcrl.errors import InfraError
from hpcrl.inference.supervisor import Flipped, Generated, VllmServer
from hpcrl.inference.versions import Staged
from hpcrl.protocol.keys import AttemptKey
from hpcrl.protocol.messages import Sampling

__all__ = ["NewServer", "Servers"]

_RESTARTS = 5

NewServer = Callable[[int, str | None], VllmServer]
"""``new_server(slot, version)``: an engine that is not started yet; ``version`` names the start weights if they may be served."""


class Servers(ABC):
    """``servers`` are not started yet."""

    def __init__(self, servers: list[VllmServer]) -> None:
        self._servers = servers
        self.active = 0
        """The slot whose death leaves nothing for new attempts."""
        self.restarts = 0
        self.lost: InfraError | None = None
        """Why a slot has no engine any more: the end of the replica."""

    @property
    def count(self) -> int:
        """Number of slots."""
        return len(self._servers)

    @property
    def serving(self) -> bool:
        """Whether :attr:`current` is answered now."""
        return self._servers[self.active].serving

    def server(self, slot: int) -> VllmServer:
        """The engine that is in a slot now."""
        return self._servers[slot]

    async def start(self) -> float:
        """Start all; returns the seconds until the last one answered. Raises InfraError("engine_start")."""
        return max(await asyncio.gather(*(server.start() for server in self._servers)))

    async def stop(self) -> None:
        """End all; no process of them is left."""
        await asyncio.gather(*(server.stop() for server in self._servers))

    async def check(self, staged: Staged) -> None:
        """Before :meth:`flip`: compare staged bytes with their manifest; all goes on meanwhile. Raises InfraError("flip_refused")."""
        await self._servers[self.active].check(staged.manifest, staged.staging)

    async def renew(self, slot: int, why: str) -> None:
        """Put a new engine into the slot, with what it has to serve.

        Raises InfraError, which is then also :attr:`lost`, when it does not come up or the budget of restarts is spent.
        """
        try:
            await self._servers[slot].stop()
            self.restarts += 1
            if self.restarts > _RESTARTS:
                raise InfraError("engine_dead", f"the engine was restarted {_RESTARTS} times; the last cause: {why}")
            self._servers[slot] = self._new(slot)
            await self._servers[slot].start()
            await self._fill(slot)
        except InfraError as error:
            self.lost = error
            raise

    # ------------------------------------------------------------ of each kind

    @property
    @abstractmethod
    def flips_pause(self) -> bool:
        """Whether calls have to wait while a flip is under way."""

    @property
    @abstractmethod
    def current(self) -> str | None:
        """The version that new attempts meet: the last that was verified in an engine; None before the first."""

    @abstractmethod
    def version_for(self, key: AttemptKey) -> str | None:
        """The version that may answer the attempt: the current one if that is allowed, else an older one still served."""

    @abstractmethod
    async def generate(
        self, version: str, token_ids: list[int], sampling: Sampling, stop_token_ids: list[int], **more: Any
    ) -> Generated:
        """Sample a continuation with ``version``. Raises InfraError, DataError."""

    @abstractmethod
    async def flip(self, staged: Staged, keep: Collection[str], on_broken: Callable[[str], Awaitable[None]]) -> Flipped:
        """Make ``staged``, which was checked, the current version. ``keep`` are older ones that attempts are still bound to.

        Raises InfraError when it is refused; the previous version is then served as before. If it had to be loaded again,
        ``on_broken(reason)`` was awaited before that.
        """

    @abstractmethod
    def _new(self, slot: int) -> VllmServer:
        """An engine for the slot."""

    @abstractmethod
    async def _fill(self, slot: int) -> None:
        """Load into a new engine what was verified before. Raises InfraError."""
