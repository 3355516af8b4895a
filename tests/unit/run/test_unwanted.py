"""Which generations are dropped, and when the coordinator is asked; both sides are stand-ins."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from hpcrl.protocol import messages as m
from hpcrl.protocol.client import ENDED, CoordinatorGone
from hpcrl.run import unwanted


class Coordinator:
    def __init__(self, *replies: dict[str, str] | CoordinatorGone) -> None:
        self.replies = list(replies)
        self.asked: list[m.EndedRequest] = []

    async def call(self, endpoint: Any, request: Any) -> Any:
        assert endpoint is ENDED
        self.asked.append(request)
        reply = self.replies.pop(0)
        if isinstance(reply, CoordinatorGone):
            raise reply
        return m.EndedReply(ended=reply)


class Replica:
    def __init__(self, *under_way: list[str]) -> None:
        self.looks = list(under_way)
        self.over = asyncio.Event()
        self.cancelled: list[str] = []

    @property
    def attempts_under_way(self) -> list[str]:
        if not self.looks:
            self.over.set()
            return []
        return self.looks.pop(0)

    async def cancel(self, attempt_id: str) -> None:
        self.cancelled.append(attempt_id)


def test_only_what_generates_is_asked_for_and_a_missing_coordinator_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unwanted, "_LOOK_S", 0.0)

    async def main() -> None:
        gone = CoordinatorGone("coordinator_gone", "no answer")
        coordinator = Coordinator({}, gone, {"a1": "lease_expired"})
        replica = Replica([], ["a0"], ["a0"], [], ["a0", "a1"])
        task = asyncio.create_task(unwanted.drop_unwanted(coordinator, replica, "r0"))
        await replica.over.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert [request.attempt_ids for request in coordinator.asked] == [["a0"], ["a0"], ["a0", "a1"]]
        assert {request.replica_id for request in coordinator.asked} == {"r0"}
        assert replica.cancelled == ["a1"]

    asyncio.run(main())
