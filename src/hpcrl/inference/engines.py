"""Versions as whole models: which engine serves what, and how a version gets into it.

One slot:   the engine that serves is paused, loaded and resumed. When that fails, its weights are undefined: the last verified
            version is loaded again, if need be into a new engine.
Two slots:  the standby engine is loaded while the active one serves; then they change places. The older version is answered until
            the next flip needs its engine. When a load fails, only the standby engine is replaced.

Staged bytes are compared with their manifest before every load, also when they are loaded again, and the plugin compares what the
model then holds with them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import Any

from hpcrl.errors import InfraError
from hpcrl.inference.servers import NewServer, Servers
from hpcrl.inference.supervisor import Flipped, Generated, VllmServer
from hpcrl.inference.versions import Staged, VersionHolder
from hpcrl.protocol.keys import AttemptKey
from hpcrl.protocol.messages import Sampling

__all__ = ["Engines"]

logger = logging.getLogger(__name__)


class Engines(Servers):
    """``slots`` engines; ``initial`` names the start weights, None: nothing is served before the first flip."""

    def __init__(self, slots: int, initial: str | None, new_server: NewServer) -> None:
        super().__init__([new_server(slot, initial if slot == 0 else None) for slot in range(slots)])
        self._versions = VersionHolder(initial)
        self._new_server = new_server

    @property
    def flips_pause(self) -> bool:
        return self.count == 1

    @property
    def current(self) -> str | None:
        return self._versions.current

    def version_for(self, key: AttemptKey) -> str | None:
        if self.current is not None and key.allows(self.current):
            return self.current
        held = [server.served_version for server in self._servers if server.serving]
        return next((version for version in held if version is not None and key.allows(version)), None)

    async def generate(
        self, version: str, token_ids: list[int], sampling: Sampling, stop_token_ids: list[int], **more: Any
    ) -> Generated:
        """When no engine serves ``version``, the active one answers (it will say what it is)."""
        held = [server for server in self._servers if server.served_version == version and server.serving]
        server = held[0] if held else self._servers[self.active]
        return await server.generate(token_ids, sampling, stop_token_ids, **more)

    async def flip(self, staged: Staged, keep: Collection[str], on_broken: Callable[[str], Awaitable[None]]) -> Flipped:
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

    def _new(self, slot: int) -> VllmServer:
        return self._new_server(slot, self._versions.start_version if slot == self.active else None)

    async def _fill(self, slot: int) -> None:
        """The active one gets the last verified version."""
        fallback = self._versions.fallback
        if slot == self.active and fallback is not None:
            await self._load(fallback)

    async def _load(self, fallback: Staged) -> None:
        """Load the last verified version into the active engine, which serves nothing; its bytes are checked again."""
        await self.check(fallback)
        await self._servers[self.active].flip(fallback.manifest, fallback.staging)
