from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from hpcrl.inference.answers import ApiError
from hpcrl.inference.landings import Landings


class Owner:
    """What calls belong to."""


class Work:
    """Counts its runs; each ends when ``go`` is set."""

    def __init__(self) -> None:
        self.runs = self.cancelled = 0
        self.go = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> int:
        self.runs += 1
        number = self.runs
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return number


async def never() -> None:
    await asyncio.Event().wait()


async def spin() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario()

    asyncio.run(main())


def test_a_repeated_call_joins_the_first_or_gets_its_answer() -> None:
    async def scenario() -> None:
        landings, owner, work = Landings[int](), Owner(), Work()
        both = [asyncio.create_task(landings.land(owner, "k", b"x", work, never())) for _ in range(2)]
        await spin()
        work.go.set()
        assert await asyncio.gather(*both) == [1, 1]
        assert await landings.land(owner, "k", b"x", work, never()) == 1
        assert await landings.land(owner, "other", b"x", work, never()) == 2
        assert await landings.land(owner, None, b"x", work, never()) == 3
        assert await landings.land(Owner(), "k", b"x", work, never()) == 4
        with pytest.raises(ApiError, match="another body"):
            await landings.land(owner, "k", b"y", work, never())

    run(scenario)


def test_the_last_client_to_leave_cancels() -> None:
    async def scenario() -> None:
        landings, owner, work = Landings[int](), Owner(), Work()
        leaves = [asyncio.Event(), asyncio.Event()]
        calls = [asyncio.create_task(landings.land(owner, "k", b"x", work, leave.wait())) for leave in leaves]  # type: ignore[arg-type]
        await spin()
        leaves[0].set()
        assert await calls[0] is None
        assert (work.runs, work.cancelled) == (1, 0)
        leaves[1].set()
        assert await calls[1] is None
        await spin()
        assert work.cancelled == 1
        work.go.set()
        assert await landings.land(owner, "k", b"x", work, never()) == 2

    run(scenario)


def test_a_failed_call_frees_its_key() -> None:
    async def scenario() -> None:
        landings, owner, work = Landings[int](), Owner(), Work()
        work.go.set()
        work.error = ValueError("no")
        with pytest.raises(ValueError, match="no"):
            await landings.land(owner, "k", b"x", work, never())
        work.error = None
        assert await landings.land(owner, "k", b"x", work, never()) == 2

    run(scenario)


def test_the_end_of_an_owner_cancels_its_calls() -> None:
    async def scenario() -> None:
        landings, owner, work = Landings[int](), Owner(), Work()
        call = asyncio.create_task(landings.land(owner, None, b"x", work, never()))
        await spin()
        landings.cancel(owner)
        assert await call is None
        assert work.cancelled == 1
        landings.cancel(Owner())

    run(scenario)
