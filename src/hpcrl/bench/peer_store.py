"""The same work on agent-lightning's in-memory store: rollouts enqueued, taken, and completed. An optional peer of the bench.

Its pins do not fit beside ours, so it lives in an environment of its own (``tools/setup-peers``), whose Python runs this file as a
script: nothing of hpcrl may be imported here.

    python peer_store.py ROLLOUTS          prints rollouts per second
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["agentlightning_rate"]


def agentlightning_rate(rollouts: int) -> float | None:
    """Rollouts per second through ``InMemoryLightningStore`` (agent-lightning 0.3.0), in a process of its own; None without it.

    The Python is ``$HPCRL_PEERS``, else ``.venv-peers/bin/python`` beside our own environment. Raises CalledProcessError.
    """
    python = Path(os.environ.get("HPCRL_PEERS") or Path(sys.prefix).parent / ".venv-peers/bin/python")
    if not python.exists():
        return None
    command = [str(python), __file__, str(rollouts)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


async def _work(rollouts: int) -> float:
    from agentlightning.store.memory import InMemoryLightningStore  # type: ignore[import-not-found]

    store = InMemoryLightningStore()
    started = time.monotonic()
    for index in range(rollouts):
        await store.enqueue_rollout(input={"index": index})
    done = 0
    while (taken := await store.dequeue_rollout()) is not None:
        await store.update_attempt(taken.rollout_id, taken.attempt.attempt_id, status="succeeded")
        done += 1
    return done / (time.monotonic() - started)


if __name__ == "__main__":
    print(asyncio.run(_work(int(sys.argv[1]))))
