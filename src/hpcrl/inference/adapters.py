"""Versions as LoRA adapters: one engine with the base model, and up to ``slots`` adapters in it, each under its version's name.

    flip(v)   staging file ─▶ directory of v (store) ─▶ drop what nobody needs ─▶ load v beside the others, compare ─▶ v is current
                                                         │
                                                         └ waits for generations that are still under way with it

Nothing is paused, and no attempt notices: older ones go on with the adapter they are bound to. What may be dropped says the
coordinator with its grant (``keep``): versions that no live attempt is bound to. They are dropped when the next version comes, so
at most ``slots`` are held; the coordinator grants a flip only when it leaves room.

    the adapter is not what was published   it is unloaded again, all others are served as before
    loading or dropping ends in any other   the engine is in doubt, and is ended
    way
    the engine ended or died                its successor gets all adapters that are held, each compared again (Servers.renew)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.errors import DataError, InfraError
from hpcrl.inference.servers import NewServer, Servers
from hpcrl.inference.supervisor import Flipped, Generated, VllmServer
from hpcrl.inference.versions import Staged
from hpcrl.protocol.keys import AttemptKey
from hpcrl.protocol.messages import Sampling
from hpcrl.weights.adapter_store import AdapterStore
from hpcrl.weights.manifest import Manifest

__all__ = ["Adapters"]

_POLL_S = 0.02
_ABORT_S = 2.0
"""How long a generation that was given up may still run: vLLM aborts it 0.1 s after it lost its client. Taking the adapter away from
under it would end the engine."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A verified adapter: what an engine is filled from."""

    manifest: Path
    directory: Path


class Adapters(Servers):
    """Nothing is served before the first flip: the base model itself has no version."""

    def __init__(self, slots: int, new_server: NewServer, store: AdapterStore) -> None:
        super().__init__([new_server(0, None)])
        self._slots = slots
        self._new_server = new_server
        self._store = store
        self._held: dict[str, _Held] = {}
        self._current: str | None = None
        self._generating: Counter[str] = Counter()

    @property
    def flips_pause(self) -> bool:
        return False

    @property
    def current(self) -> str | None:
        return self._current

    @property
    def held(self) -> list[str]:
        """The versions that are served, oldest first."""
        return list(self._held)

    def version_for(self, key: AttemptKey) -> str | None:
        newest_first = [self._current, *reversed(self._held)]
        return next((version for version in newest_first if version is not None and key.allows(version)), None)

    async def generate(
        self, version: str, token_ids: list[int], sampling: Sampling, stop_token_ids: list[int], **more: Any
    ) -> Generated:
        self._generating[version] += 1
        linger_s = _ABORT_S
        try:
            generated = await self._servers[0].generate(token_ids, sampling, stop_token_ids, adapter=version, **more)
            linger_s = 0.0
            return generated
        finally:
            asyncio.get_running_loop().call_later(linger_s, self._ended, version)

    def _ended(self, version: str) -> None:
        self._generating[version] -= 1

    async def flip(self, staged: Staged, keep: Collection[str], on_broken: Callable[[str], Awaitable[None]]) -> Flipped:
        if staged.version in self._held:
            raise InfraError("flip_refused", f"adapter {staged.version} is held already")
        for version in [version for version in self._held if version not in (*keep, self._current)]:
            await self._drop(version)
        if len(self._held) >= self._slots:
            raise InfraError(
                "flip_refused", f"no place for adapter {staged.version}: attempts are bound to {', '.join(self._held)}"
            )
        held = _Held(staged.manifest, await asyncio.to_thread(self._write, staged))
        try:
            load_s = await self._servers[0].load_adapter(staged.version, held.manifest, held.directory)
        except InfraError as error:
            if error.reason != "adapter_refused":
                await self._servers[0].stop()
            self._store.remove(staged.version)
            raise
        self._held[staged.version] = held
        self._current = staged.version
        return Flipped(staged.version, load_s, load_s)

    async def _drop(self, version: str) -> None:
        """No call begins with it from here on; generations with it end by themselves, as each has its time limit."""
        del self._held[version]
        while self._generating[version]:
            await asyncio.sleep(_POLL_S)
        del self._generating[version]
        try:
            await self._servers[0].drop_adapter(version)
        except InfraError:
            await self._servers[0].stop()
            raise
        finally:
            self._store.remove(version)

    def _write(self, staged: Staged) -> Path:
        try:
            manifest = Manifest.from_json(staged.manifest.read_bytes())
        except (OSError, DataError) as error:
            raise InfraError("flip_refused", f"manifest {staged.manifest}: {error}") from error
        return self._store.write(manifest, staged.staging)

    def _new(self, slot: int) -> VllmServer:
        return self._new_server(slot, None)

    async def _fill(self, slot: int) -> None:
        for version, held in self._held.items():
            await self._servers[slot].load_adapter(version, held.manifest, held.directory)
