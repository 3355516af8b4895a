"""Coalesces single reports into batched calls: many attempts end within milliseconds of each other, and one call costs as much as ten.

    put(item) ──► open batch ──(delay_s after its first item, or at once when it is full)──► send(items) ──► every put() returns

Several sends may be under way at once. An error of ``send`` is raised in every ``put`` of that batch. A ``put`` that is cancelled
takes nothing back: its report is still sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from hpcrl.protocol.messages import Ack

__all__ = ["Batcher"]

Item = TypeVar("Item")


class _Batch(Generic[Item]):
    def __init__(self) -> None:
        self.items: list[Item] = []
        self.full = asyncio.Event()
        self.sent: asyncio.Task[Ack] | None = None


class Batcher(Generic[Item]):
    """``send`` makes the batched call, ``name`` gives an item's attempt_id (to find it in the Ack)."""

    def __init__(
        self,
        send: Callable[[list[Item]], Awaitable[Ack]],
        name: Callable[[Item], str],
        *,
        delay_s: float = 0.015,
        max_items: int = 256,
    ) -> None:
        self._send = send
        self._name = name
        self._delay_s = delay_s
        self._max_items = max_items
        self._open: _Batch[Item] | None = None

    async def put(self, item: Item) -> str | None:
        """Report ``item``. Returns None when it was accepted, else why it was rejected. Raises what ``send`` raises."""
        batch = self._open
        if batch is None:
            batch = self._open = _Batch()
            batch.sent = asyncio.create_task(self._deliver(batch))
        batch.items.append(item)
        if len(batch.items) >= self._max_items:
            self._open = None
            batch.full.set()
        ack = await asyncio.shield(batch.sent) if batch.sent is not None else Ack()
        return ack.rejected.get(self._name(item))

    async def _deliver(self, batch: _Batch[Item]) -> Ack:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._delay_s):
                await batch.full.wait()
        if self._open is batch:
            self._open = None
        return await self._send(batch.items)
