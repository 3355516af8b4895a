"""How a worker or scorer ends: all its tasks are cancelled, within a bounded time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

__all__ = ["cancel_all"]

log = logging.getLogger(__name__)

_ROUNDS = 3


async def cancel_all(tasks: Iterable[asyncio.Task[Any]], patience_s: float = 5.0) -> None:
    """Cancel ``tasks`` and wait for them, up to three times ``patience_s``. A task that will not end is named in the log."""
    pending = {task for task in tasks if not task.done()}
    for _ in range(_ROUNDS):
        for task in pending:
            task.cancel()
        if not pending:
            return
        _, pending = await asyncio.wait(pending, timeout=patience_s)
    for task in pending:
        log.error("task %s does not end: %s", task.get_name(), [str(frame) for frame in task.get_stack()])
