"""Drops generations that nobody wants any more, as soon as the coordinator knows: expired leases, closed groups, stale attempts.

    every ``_LOOK_S``: calls under way? ── no ──▶ nothing is asked
                              └── yes ─▶ ENDED (long poll, these attempts) ─▶ Replica.cancel for each that has ended

A worker that lives drops its connections itself, and the proxy notices; this is for those that are silent, dead, or cut off, and for
what they have not heard of yet. A poll does not know of calls that begin after it was sent: it is short.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol, TypeVar

from hpcrl.protocol import client as api
from hpcrl.protocol import messages as m
from hpcrl.protocol.client import CoordinatorGone

__all__ = ["drop_unwanted"]

log = logging.getLogger(__name__)

_LOOK_S = 0.25
_POLL_S = 0.5

Req = TypeVar("Req", bound=m.Message)
Rep = TypeVar("Rep", bound=m.Message)


class Coordinator(Protocol):
    """What is needed of ``protocol.client.AsyncClient``."""

    async def call(self, endpoint: api.Endpoint[Req, Rep], request: Req) -> Rep: ...


class Generating(Protocol):
    """What is needed of ``inference.replica.Replica``."""

    @property
    def attempts_under_way(self) -> list[str]: ...

    async def cancel(self, attempt_id: str) -> None: ...


async def drop_unwanted(client: Coordinator, replica: Generating, replica_id: str) -> None:
    """Runs until it is cancelled; never ends because the coordinator is away. Raises InfraError when it refuses the call."""
    while True:
        await asyncio.sleep(_LOOK_S)
        attempt_ids = replica.attempts_under_way
        if not attempt_ids:
            continue
        request = m.EndedRequest(replica_id=replica_id, attempt_ids=attempt_ids, wait_s=_POLL_S)
        try:
            reply = await client.call(api.ENDED, request)
        except CoordinatorGone as error:
            log.warning("%s", error)  # whoever needs it to go on ends with it
            continue
        for attempt_id, reason in reply.ended.items():
            log.info("attempt %s is not wanted any more (%s): its calls are dropped", attempt_id, reason)
            await replica.cancel(attempt_id)
