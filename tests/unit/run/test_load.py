"""What is told of a replica's KV use; both sides are stand-ins."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hpcrl.protocol import messages as m
from hpcrl.protocol.client import LOAD, CoordinatorGone
from hpcrl.run.load import report_load


class Over(Exception):
    """The samples are used up."""


class Replica:
    def __init__(self, *samples: float | None) -> None:
        self.samples = list(samples)

    async def kv_use(self) -> float | None:
        if not self.samples:
            raise Over
        return self.samples.pop(0)


class Coordinator:
    def __init__(self, away: int) -> None:
        self.away = away
        self.told: list[float] = []

    async def call(self, endpoint: Any, request: Any) -> Any:
        assert endpoint is LOAD and request.replica_id == "r0"
        self.told.append(request.kv_use)
        if len(self.told) == self.away:
            raise CoordinatorGone("coordinator_gone", "no answer")
        return m.Empty()


def test_a_mean_of_the_samples_is_told_and_gaps_change_nothing() -> None:
    coordinator = Coordinator(away=2)
    with pytest.raises(Over):
        asyncio.run(report_load(coordinator, Replica(1.0, None, 1.0, 0.0), "r0", sample_s=0.0))
    assert coordinator.told == pytest.approx([0.2, 0.36, 0.288])
