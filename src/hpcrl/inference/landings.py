"""Calls under way and calls that have landed, by idempotency key: a repeated call joins the first one or gets its answer.

    call ─▶ known key? ── no ──▶ a task of its own ─▶ answer, kept under its key as long as the owner lives
               └── yes ─▶ waits for the same task      error or cancelled: the key is free again
    client gone ─▶ one waiter less; the last one cancels the task
    owner ends  ─▶ ``cancel`` cancels its tasks; their waiters get None

A landed call is never run twice, and a call that nobody waits for does not run on. Owners are held weakly: what is kept for one goes
with it. Use from one event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from hpcrl.inference.answers import ApiError

__all__ = ["Landings"]

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Landing(Generic[T]):
    task: asyncio.Task[T]
    digest: bytes
    waiters: int = 0


@dataclass(slots=True)
class _Owned(Generic[T]):
    keyed: dict[str, _Landing[T]] = field(default_factory=dict)
    running: set[asyncio.Task[T]] = field(default_factory=set)


class Landings(Generic[T]):
    """See the module's docstring."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Any, _Owned[T]] = WeakKeyDictionary()

    async def land(
        self, owner: Any, key: str | None, body: bytes, run: Callable[[], Coroutine[Any, Any, T]], gone: Awaitable[None]
    ) -> T | None:
        """The answer of ``run()``, or of the call that came first with this key; None when it was cancelled.

        ``gone`` ends when the client has left. Raises what ``run()`` raises, ApiError(422) when the key came with another ``body``.
        """
        owned = self._of.setdefault(owner, _Owned())
        leaving = asyncio.ensure_future(gone)
        landing: _Landing[T] | None = None
        try:
            landing = self._landing(owned, key, body, run)
            landing.waiters += 1
            await asyncio.wait((landing.task, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not landing.task.done() or landing.task.cancelled():
                return None
            return landing.task.result()
        finally:
            leaving.cancel()
            if landing is not None:
                landing.waiters -= 1
                if not landing.waiters and not landing.task.done():
                    if key is not None and owned.keyed.get(key) is landing:
                        del owned.keyed[key]  # at once: a retry must not join what is being cancelled
                    landing.task.cancel()

    def cancel(self, owner: Any) -> None:
        """Cancel what runs for ``owner``."""
        owned = self._of.get(owner)
        for task in () if owned is None else tuple(owned.running):
            task.cancel()

    def _landing(
        self, owned: _Owned[T], key: str | None, body: bytes, run: Callable[[], Coroutine[Any, Any, T]]
    ) -> _Landing[T]:
        digest = b"" if key is None else hashlib.sha256(body).digest()
        known = None if key is None else owned.keyed.get(key)
        if known is not None:
            if known.digest != digest:
                raise ApiError(422, "idempotency_key_reused", "this Idempotency-Key came before with another body")
            return known
        landing = _Landing(asyncio.create_task(run()), digest)
        owned.running.add(landing.task)
        if key is not None:
            owned.keyed[key] = landing

        def ended(task: asyncio.Task[T]) -> None:
            owned.running.discard(task)
            failed = task.cancelled() or task.exception() is not None
            if failed and key is not None and owned.keyed.get(key) is landing:
                del owned.keyed[key]

        landing.task.add_done_callback(ended)
        return landing
