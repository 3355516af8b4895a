from __future__ import annotations

import asyncio
import logging

import pytest

from hpcrl.run.ending import cancel_all


class Stubborn:
    """A task that swallows its first ``times`` cancellations."""

    def __init__(self, times: int) -> None:
        self.left = times

    async def run(self) -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if self.left <= 0:
                    raise
                self.left -= 1


def end(times: int) -> bool:
    async def main() -> bool:
        task = asyncio.create_task(Stubborn(times).run(), name="stubborn")
        done = asyncio.create_task(asyncio.sleep(0))
        await asyncio.sleep(0.001)
        await cancel_all([task, done], patience_s=0.02)
        ended = task.done()
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)
        return ended

    return asyncio.run(main())


def test_tasks_end_also_when_a_cancellation_was_swallowed() -> None:
    assert end(0) and end(2)


def test_one_that_never_ends_is_named_and_left(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert not end(5)
    assert "stubborn" in caplog.text
