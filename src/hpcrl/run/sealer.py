"""Trajectories → sealed shards → SEALED reports.

    add(trajectory) ──► queue ──► collect until one of these ──► write + seal (thread) ──► report(items)
                                    ``seal_every`` are there, ``seal_after_s`` are over, or no other attempt is alive here

One shard at a time: while one is written in a thread, the next one's trajectories gather in the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from hpcrl.protocol.messages import SealedItem
from hpcrl.trajectory import ShardWriter, Trajectory

__all__ = ["Sealer"]


class Sealer:
    """``root`` is the run directory: shard paths are reported relative to it. ``report`` gets the rows of one sealed shard and the
    seconds that writing it took. ``alive`` tells how many attempts could still come, those already here included: the last one of
    a step must not wait for company that cannot arrive."""

    def __init__(
        self,
        root: Path,
        writer: ShardWriter,
        report: Callable[[list[SealedItem], float], Awaitable[None]],
        *,
        seal_every: int,
        seal_after_s: float,
        alive: Callable[[], int],
    ) -> None:
        self._root = root
        self._writer = writer
        self._report = report
        self._seal_every = seal_every
        self._seal_after_s = seal_after_s
        self._alive = alive
        self._queue: asyncio.Queue[Trajectory] = asyncio.Queue()

    def add(self, trajectory: Trajectory) -> None:
        """Queue a validated trajectory."""
        self._queue.put_nowait(trajectory)

    async def run(self) -> None:
        """Seal shards until cancelled. What is queued then is dropped: its attempts are not reported and are tried again."""
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._queue.get()]
            deadline = loop.time() + self._seal_after_s
            while len(batch) < self._seal_every and (self._queue.qsize() or len(batch) < self._alive()):
                try:
                    async with asyncio.timeout_at(deadline):
                        batch.append(await self._queue.get())
                except TimeoutError:
                    break
            started = loop.time()
            items = await asyncio.to_thread(self._write, batch)
            await self._report(items, loop.time() - started)

    def _write(self, batch: list[Trajectory]) -> list[SealedItem]:
        rows = [self._writer.append(trajectory) for trajectory in batch]
        path, _ = self._writer.seal()
        shard = path.relative_to(self._root).as_posix()
        return [
            SealedItem(
                attempt_id=trajectory.attempt_id,
                shard=shard,
                row=row,
                tokens=trajectory.tokens,
                trained_tokens=trajectory.trained_tokens,
                oldest_version=str(trajectory.oldest_version),
                newest_version=str(trajectory.newest_version),
                first_token_at=trajectory.first_token_at,
            )
            for trajectory, row in zip(batch, rows, strict=True)
        ]
