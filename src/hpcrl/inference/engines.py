"""The vLLM servers of one replica: which of them serves what, how a version gets into them, and how a broken one is replaced.

One slot:   the engine that serves is paused, loaded and resumed. When that fails, its weights are undefined: the last verified
            version is loaded again, if need be into a new engine.
Two slots:  the standby engine is loaded while the active one serves; then they change places. The older version is answered until
            the next flip needs its engine. When a load fails, only the standby engine is replaced.

Staged bytes are compared with their manifest before every load, also when they are loaded again, and the plugin compares what the
model then holds with them. No locking: the caller sees to it that one flip or replacement is under way at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from hpcrl.errors import InfraError
from hpcrl.inference.supervisor import Flipped, VllmServer
from hpcrl.inference.versions import Staged, VersionHolder
from hpcrl.protocol.keys import AttemptKey

__all__ = ["Engines", "NewServer"]

logger = logging.getLogger(__name__)

_RESTARTS = 5

NewServer = Callable[[int, str | None], VllmServer]
"""``new_server(slot, version)``: an engine that is not started yet; ``version`` names the start weights if they may be served."""


class Engines:
    """``slots`` engines; ``initial`` names the start weights, None: nothing is served before the first flip."""

    def __init__(self, slots: int, initial: str | None, new_server: NewServer) -> None:
        self._versions = VersionHolder(initial)
        self._new_server = new_server
        self._servers = [new_server(slot, initial if slot == 0 else None) for slot in range(slots)]
        self.active = 0
        self.restarts = 0
        self.lost: InfraError | None = None
        """Why a slot has no engine any more: the end of the replica."""

    @property
    def count(self) -> int:
        """Number of slots."""
        return len(self._servers)

    @property
    def current(self) -> str | None:
        """The version that new attempts meet: the last that was verified in an engine; None before the first."""
        return self._versions.current

    @property
    def serving(self) -> bool:
        """Whether :attr:`current` is answered now."""
        return self._servers[self.active].serving

    def server(self, slot: int) -> VllmServer:
        """The engine that is in a slot now."""
        return self._servers[slot]

    def version_for(self, key: AttemptKey) -> str | None:
        """The version that may answer the attempt: the current one if that is allowed, else an older one still served."""
        if self.current is not None and key.allows(self.current):
            return self.current
        held = [server.served_version for server in self._servers if server.serving]
        return next((version for version in held if version is not None and key.allows(version)), None)

    def holding(self, version: str) -> VllmServer:
        """The engine that serves ``version``; the active one when none does (it will say what it is)."""
        held = [server for server in self._servers if server.served_version == version and server.serving]
        return held[0] if held else self._servers[self.active]

    async def start(self) -> float:
        """Start all; returns the seconds until the last one answered. Raises InfraError("engine_start")."""
        return max(await asyncio.gather(*(server.start() for server in self._servers)))

    async def stop(self) -> None:
        """End all; no process of them is left."""
        await asyncio.gather(*(server.stop() for server in self._servers))

    async def check(self, staged: Staged) -> None:
        """Before :meth:`flip`: compare staged bytes with their manifest; all goes on meanwhile. Raises InfraError("flip_refused")."""
        await self._servers[self.active].check(staged.manifest, staged.staging)

    async def flip(self, staged: Staged, on_broken: Callable[[str], Awaitable[None]]) -> Flipped:
        """Make ``staged``, which was checked, the current version.

        Raises InfraError when it is refused; the previous version is then served as before. If it had to be loaded again,
        ``on_broken(reason)`` was awaited before that.
        """
        slot = self.active if self.count == 1 else 1 - self.active
        try:
            flipped = await self._servers[slot].flip(staged.manifest, staged.staging)
        except InfraError as error:
            if error.reason != "flip_refused":
                logger.error("flip to %s failed: %s", staged.version, error)
                if slot == self.active:
                    await on_broken(str(error))
                    await self._reload()
                else:
                    await self.renew(slot, "a flip failed")
            raise
        self._versions.verified(staged)
        paused_s = flipped.pause_s if slot == self.active else 0.0
        self.active = slot
        return replace(flipped, pause_s=paused_s)

    async def _reload(self) -> None:
        """After a flip left the weights undefined: load the last verified version, or start anew from the start weights."""
        fallback = self._versions.fallback
        if fallback is not None:
            with contextlib.suppress(InfraError):
                await self._load(fallback)
                return
        await self.renew(self.active, "a flip failed")

    async def renew(self, slot: int, why: str) -> None:
        """Put a new engine into the slot; the active one gets the last verified version.

        Raises InfraError, which is then also :attr:`lost`, when it does not come up or the budget of restarts is spent.
        """
        try:
            await self._renew(slot, why)
        except InfraError as error:
            self.lost = error
            raise

    async def _renew(self, slot: int, why: str) -> None:
        await self._servers[slot].stop()
        self.restarts += 1
        if self.restarts > _RESTARTS:
            raise InfraError("engine_dead", f"the engine was restarted {_RESTARTS} times; the last cause: {why}")
        active = slot == self.active
        self._servers[slot] = self._new_server(slot, self._versions.start_version if active else None)
        await self._servers[slot].start()
        fallback = self._versions.fallback
        if active and fallback is not None:
            await self._load(fallback)

    async def _load(self, fallback: Staged) -> None:
        """Load the last verified version into the active engine, which serves nothing; its bytes are checked again."""
        await self.check(fallback)
        await self._servers[self.active].flip(fallback.manifest, fallback.staging)
