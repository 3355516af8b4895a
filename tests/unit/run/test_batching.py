from __future__ import annotations

import asyncio

import pytest

from hpcrl.errors import InfraError
from hpcrl.protocol.messages import Ack
from hpcrl.run.batching import Batcher


class Receiver:
    def __init__(self, error: Exception | None = None, rejected: dict[str, str] | None = None) -> None:
        self.batches: list[list[str]] = []
        self.error = error
        self.rejected = rejected or {}

    async def send(self, items: list[str]) -> Ack:
        self.batches.append(list(items))
        await asyncio.sleep(0.005)
        if self.error is not None:
            raise self.error
        return Ack(accepted=[i for i in items if i not in self.rejected], rejected=self.rejected)


def batcher(receiver: Receiver, delay_s: float = 0.01, max_items: int = 256) -> Batcher[str]:
    return Batcher(receiver.send, lambda item: item, delay_s=delay_s, max_items=max_items)


def test_items_of_a_moment_are_one_call_and_each_gets_its_verdict() -> None:
    receiver = Receiver(rejected={"b": "lease_expired"})

    async def main() -> list[str | None]:
        queue = batcher(receiver)
        return await asyncio.gather(*(queue.put(name) for name in "abc"))

    assert asyncio.run(main()) == [None, "lease_expired", None]
    assert receiver.batches == [["a", "b", "c"]]


def test_later_items_are_another_call_and_a_full_batch_does_not_wait() -> None:
    receiver = Receiver()

    async def main() -> None:
        queue = batcher(receiver, delay_s=30.0, max_items=2)
        await asyncio.wait_for(asyncio.gather(*(queue.put(name) for name in "abcd")), 1.0)

    asyncio.run(main())
    assert receiver.batches == [["a", "b"], ["c", "d"]]


def test_items_during_a_send_are_the_next_batch() -> None:
    receiver = Receiver()

    async def main() -> None:
        queue = batcher(receiver, delay_s=0.001)
        first = asyncio.create_task(queue.put("a"))
        while not receiver.batches:
            await asyncio.sleep(0)
        await queue.put("b")
        await first

    asyncio.run(main())
    assert receiver.batches == [["a"], ["b"]]


def test_an_error_reaches_every_put() -> None:
    async def main() -> list[object]:
        queue = batcher(Receiver(error=InfraError("coordinator_gone")))
        return await asyncio.gather(queue.put("a"), queue.put("b"), return_exceptions=True)

    results = asyncio.run(main())
    assert [type(result) for result in results] == [InfraError, InfraError]


def test_a_cancelled_put_is_still_sent() -> None:
    receiver = Receiver()

    async def main() -> None:
        queue = batcher(receiver)
        lost, kept = asyncio.create_task(queue.put("a")), asyncio.create_task(queue.put("b"))
        await asyncio.sleep(0)
        lost.cancel()
        assert await kept is None
        with pytest.raises(asyncio.CancelledError):
            await lost

    asyncio.run(main())
    assert receiver.batches == [["a", "b"]]
