"""Tells the coordinator how full a replica's KV cache is: by that it binds new attempts.

    every ``_SAMPLE_S``: vLLM's metrics ─▶ mean with the samples before ─▶ LOAD

One sample says little: attempts whose tools run hold nothing just then. The mean forgets a sample in about ``_SAMPLE_S / _WEIGHT``.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from hpcrl.protocol import client as api
from hpcrl.protocol import messages as m
from hpcrl.protocol.client import CoordinatorGone

__all__ = ["report_load"]

log = logging.getLogger(__name__)

_SAMPLE_S = 2.0
_WEIGHT = 0.2


class Coordinator(Protocol):
    """What is needed of ``protocol.client.AsyncClient``."""

    async def call(self, endpoint: api.Endpoint[m.ReplicaLoad, m.Empty], request: m.ReplicaLoad) -> m.Empty: ...


class Loaded(Protocol):
    """What is needed of ``inference.replica.Replica``."""

    async def kv_use(self) -> float | None: ...


async def report_load(client: Coordinator, replica: Loaded, replica_id: str, sample_s: float = _SAMPLE_S) -> None:
    """Runs until it is cancelled; never ends because the coordinator is away. Raises InfraError when it refuses the call."""
    mean = 0.0
    while True:
        await asyncio.sleep(sample_s)
        sample = await replica.kv_use()
        if sample is None:
            continue
        mean += _WEIGHT * (sample - mean)
        try:
            await client.call(api.LOAD, m.ReplicaLoad(replica_id=replica_id, kv_use=mean))
        except CoordinatorGone as error:
            log.warning("%s", error)  # whoever needs it to go on ends with it
