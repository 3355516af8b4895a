"""The same work on agent-lightning's in-memory store: a rollout enqueued, taken, and completed. An optional peer of the bench."""

from __future__ import annotations

import asyncio
import time

__all__ = ["agentlightning_rate"]


def agentlightning_rate(rollouts: int) -> float | None:
    """Rollouts per second through ``InMemoryLightningStore`` (agent-lightning 0.3.0); None where it is not installed."""
    try:
        from agentlightning.store.memory import InMemoryLightningStore  # type: ignore[import-not-found]
    except ImportError:
        return None

    async def work() -> float:
        store = InMemoryLightningStore()
        started = time.monotonic()
        for index in range(rollouts):
            await store.enqueue_rollout(input={"index": index})
        done = 0
        while (taken := await store.dequeue_rollout()) is not None:
            await store.update_attempt(taken.rollout_id, taken.attempt.attempt_id, status="succeeded")
            done += 1
        return done / (time.monotonic() - started)

    return asyncio.run(work())
