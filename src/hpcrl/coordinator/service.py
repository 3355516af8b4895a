"""The queue as an asyncio service: applies calls one at a time, makes them durable, wakes those that wait.

    handle(call):  look up the idempotency key ── known ──▶ the first answer
                   loop: apply to the queue (synchronous, so calls never interleave)
                         submit its changes, with the answer under its key, to the store; wake named topics
                         answer ready or time over ──▶ wait for the commit, answer
                         else wait for one of the call's topics
    ticker:        lets time pass every 0.25 s (lease expiry, drains)

Every answer waits for the commit of all that it may have seen, so a crash can never take back what a caller was told.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from hpcrl.clock import Clock
from hpcrl.coordinator.entities import Group
from hpcrl.coordinator.history import rollout_history
from hpcrl.coordinator.queue import Call, Queue
from hpcrl.coordinator.restore import count_duplicates, groups_consumed_after
from hpcrl.coordinator.store import Answer, Store
from hpcrl.errors import EnvironmentFault, UserError
from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m
from hpcrl.protocol.version import PolicyVersion

__all__ = ["Caller", "Closing", "Service", "Topics"]

log = logging.getLogger(__name__)

TICK_S = 0.25
LONGEST_WAIT_S = 30.0
"""Long polls end here at the latest: well below the clients' HTTP timeout."""
KEYS_KEPT_S = 150.0
"""A repeated call finds its first answer for so long; clients give up earlier (60 s of patience and one HTTP timeout)."""
_PRUNE_EVERY_S = 15.0
_Special = Callable[[Any, str | None], Awaitable[bytes]]


class Closing(Exception):
    """The coordinator is going down: ask again, another one will answer."""


@dataclass(frozen=True, slots=True)
class _Poll:
    """When a waiting call is answered early, and which topic may bring that about."""

    ready: Callable[[Any], bool]
    topic: Callable[[Any], str]


_POLLS: dict[str, _Poll] = {
    c.LEASE.path: _Poll(lambda reply: bool(reply.leases) or reply.stop, lambda _: "lease"),
    c.SCORES.path: _Poll(
        lambda reply: bool(reply.scores or reply.cancelled), lambda request: f"scores:{request.worker_id}"
    ),
    c.LEASE_SCORING.path: _Poll(lambda reply: bool(reply.leases) or reply.stop, lambda _: "scoring"),
    c.FLIP.path: _Poll(lambda reply: reply.granted, lambda _: "flip"),
    c.ENDED.path: _Poll(lambda reply: bool(reply.ended), lambda request: f"ended:{request.replica_id}"),
    c.BATCH.path: _Poll(lambda reply: reply.groups is not None, lambda _: "batch"),
    c.EVAL_STATUS.path: _Poll(lambda reply: reply.done == reply.total, lambda _: "eval"),
}


class Caller(Protocol):
    """Who waits for an answer. ``gone``: the connection was closed; asked for the first time when the call begins to wait."""

    @property
    def gone(self) -> bool: ...


class Topics:
    """Named conditions. Applying and waiting happen on one thread, so a wake between the two cannot be missed.

    For the topics in ``PASSED_ON``, where one waiter takes what another could have taken, only the longest waiting is woken: hundreds
    of workers may wait for the one lease there is. Who found something passes the wake on, for there may be more; who found nothing
    has shown that there is nothing for the others. Other topics wake all.
    """

    PASSED_ON = frozenset({"lease", "scoring"})

    def __init__(self) -> None:
        self._waiting: dict[str, OrderedDict[asyncio.Future[None], None]] = {}

    def wake(self, topics: Iterable[str]) -> None:
        for topic in topics:
            waiting = self._waiting.get(topic)
            while waiting:
                future, _ = waiting.popitem(last=False)
                if future.done():  # cancelled, and about to leave
                    continue
                future.set_result(None)
                if topic in self.PASSED_ON:
                    break

    def pass_on(self, topic: str) -> None:
        """Wake the next one of those who take from the same."""
        if topic in self.PASSED_ON:
            self.wake((topic,))

    def wake_all(self) -> None:
        for waiting in self._waiting.values():
            for future in waiting:
                if not future.done():
                    future.set_result(None)
        self._waiting.clear()

    async def wait(self, topic: str, timeout: float) -> bool:
        """True after the topic was woken, False after ``timeout`` seconds."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        waiting = self._waiting.setdefault(topic, OrderedDict())
        waiting[future] = None
        timer = loop.call_later(timeout, self._give_up, topic, future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.pass_on(topic)  # it was woken and leaves without looking
            raise
        except TimeoutError:
            return False
        finally:
            timer.cancel()
            waiting.pop(future, None)
        return True

    def _give_up(self, topic: str, future: asyncio.Future[None]) -> None:
        if not future.done():
            self._waiting[topic].pop(future, None)
            future.set_exception(TimeoutError())


class Service:
    """``handle`` answers calls between :meth:`start` and :meth:`close`."""

    def __init__(self, queue: Queue, store: Store, clock: Clock) -> None:
        self._queue = queue
        self._store = store
        self._clock = clock
        self._topics = Topics()
        self._answers: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._under_way: dict[str, asyncio.Future[bytes]] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._closing = False
        # Calls that need the database besides the live state.
        self._special: dict[str, _Special] = {
            c.START.path: self._start,
            c.BAD_SHARD.path: self._given_back(queue.bad_shard),
            c.OFF_POLICY.path: self._given_back(queue.off_policy),
            c.STATUS.path: self._status,
            c.HISTORY.path: self._history,
        }
        self.failed = asyncio.Event()
        """Set when the database can no longer be written or time no longer passes: the process must end."""

    async def start(self) -> None:
        self._store.start()
        for key, at, reply in await self._store.call(_load_answers):
            self._answers[key] = (at, reply)
        self._ticker = asyncio.create_task(self._tick(), name="coordinator-ticker")
        self._ticker.add_done_callback(self._ticker_ended)

    async def close(self) -> None:
        """Answer waiting calls, commit, close the database."""
        self._closing = True
        self._topics.wake_all()
        if self._ticker is not None:
            self._ticker.cancel()
        await self._store.close()

    # ------------------------------------------------------------ calls

    async def handle(
        self, endpoint: c.Endpoint, request: m.Message, key: str | None, caller: Caller | None = None
    ) -> bytes:
        """The reply's JSON. Raises Refused, UserError (bad version text, no key for a call that changes something), Closing."""
        if self._closing:
            raise Closing
        if not endpoint.mutates:
            return await self._answer(endpoint, request, None, caller)
        if not key:
            raise UserError(
                f"{endpoint.path} changes something: send an Idempotency-Key header, the same for each repetition"
            )
        key = f"{endpoint.path} {key}"
        known = self._answers.get(key)
        if known is not None:
            return known[1]
        first = self._under_way.get(key)
        if first is not None:
            return await asyncio.shield(first)
        return await self._first(endpoint, request, key, caller)

    async def _first(self, endpoint: c.Endpoint, request: m.Message, key: str, caller: Caller | None) -> bytes:
        """Answer a call under a new key; repetitions that come meanwhile wait for the same answer."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._under_way[key] = future
        try:
            reply = await self._answer(endpoint, request, key, caller)
        except BaseException as error:
            future.set_exception(error if isinstance(error, Exception) else Closing())
            future.exception()
            raise
        finally:
            del self._under_way[key]
        self._answers[key] = (self._clock.now(), reply)
        future.set_result(reply)
        return reply

    async def _answer(self, endpoint: c.Endpoint, request: m.Message, key: str | None, caller: Caller | None) -> bytes:
        try:
            special = self._special.get(endpoint.path)
            return await (special(request, key) if special is not None else self._call(endpoint, request, key, caller))
        except EnvironmentFault as error:
            self._fail(error)
            raise Closing from error

    async def _call(self, endpoint: c.Endpoint, request: m.Message, key: str | None, caller: Caller | None) -> bytes:
        call, poll = self._queue.calls[endpoint.path], _POLLS.get(endpoint.path)
        if self._closing:
            raise Closing
        if poll is None:
            return await self._finish(call(request, self._clock.now()), key)
        return await self._poll(call, poll, request, key, caller)

    async def _poll(self, call: Call, poll: _Poll, request: m.Message, key: str | None, caller: Caller | None) -> bytes:
        """Apply the call until it brings something or its time is over. Nothing is applied for a caller who has gone meanwhile."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + min(getattr(request, "wait_s", 0.0), LONGEST_WAIT_S)
        waited = False
        while True:
            if self._closing:
                raise Closing
            if waited and caller is not None and caller.gone:
                self._topics.pass_on(poll.topic(request))  # nothing is leased to a dead worker
                raise Closing
            reply = call(request, self._clock.now())
            left = give_up - loop.time()
            if poll.ready(reply):
                self._topics.pass_on(poll.topic(request))
            elif left > 0:
                self._flush()
                if not waited and caller is not None and caller.gone:
                    raise Closing
                await self._topics.wait(poll.topic(request), left)
                waited = True
                continue
            return await self._finish(reply, key)

    async def _start(self, request: Any, key: str | None) -> bytes:
        after = request.checkpoint_step or 0
        groups = await self._store.call(lambda connection: groups_consumed_after(connection, after))
        return await self._finish(self._queue.start(request, groups, self._clock.now()), key)

    def _given_back(self, call: Callable[[Any, Iterable[Group], float], m.Empty]) -> _Special:
        """A call that takes back the groups of a batch, which only the database still knows."""

        async def answer(request: Any, key: str | None) -> bytes:
            after = PolicyVersion.parse(request.version).step
            groups = await self._store.call(lambda connection: groups_consumed_after(connection, after))
            return await self._finish(call(request, groups, self._clock.now()), key)

        return answer

    async def _history(self, request: Any, key: str | None) -> bytes:
        history = await self._store.call(lambda connection: rollout_history(connection, request.rollout_id))
        if history is None:
            raise UserError(
                f"no rollout {request.rollout_id}: ids look like g000012-r3 (training) or e0.5-2-r0 (evaluation)"
            )
        return await self._finish(history, None)

    async def _status(self, request: Any, key: str | None) -> bytes:
        duplicates = await self._store.call(count_duplicates)
        status = self._queue.status(request, self._clock.now())
        return await self._finish(status.model_copy(update={"duplicates": duplicates}), None)

    async def _finish(self, reply: m.Message, key: str | None) -> bytes:
        data = reply.model_dump_json().encode()
        self._flush(key, data)
        await self._store.committed()
        return data

    def _flush(self, key: str | None = None, reply: bytes = b"") -> None:
        """Hand changes to the store, the answer with them. A call that changed nothing needs no stored answer."""
        changes = self._queue.take_changes()
        if changes is not None:
            answer = None if key is None else Answer(key, self._clock.now(), reply)
            self._store.submit(changes, answer)
        wakes = self._queue.take_wakes()
        if wakes:
            self._topics.wake(wakes)

    def _fail(self, error: BaseException) -> None:
        if not self.failed.is_set():
            # Anything but a fault of the disk is a defect: its traceback is needed.
            log.error("%s", error, exc_info=None if isinstance(error, EnvironmentFault) else error)
            self.failed.set()

    # ------------------------------------------------------------ time

    async def _tick(self) -> None:
        pruned = self._clock.now()
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock.now()
            try:
                self._queue.tick(now)
                self._flush()
                if now - pruned > _PRUNE_EVERY_S:
                    pruned = now
                    await self._prune(now - KEYS_KEPT_S)
            except EnvironmentFault as error:
                self._fail(error)
                return

    def _ticker_ended(self, ticker: asyncio.Task[None]) -> None:
        """Without the ticker no lease ever expires: its error ends the coordinator."""
        error = None if ticker.cancelled() else ticker.exception()
        if error is not None:
            self._fail(error)

    async def _prune(self, before: float) -> None:
        while self._answers:
            key, (at, _) = next(iter(self._answers.items()))
            if at >= before:
                break
            del self._answers[key]
        await self._store.call(lambda connection: connection.execute("DELETE FROM idempotency WHERE at < ?", (before,)))


def _load_answers(connection: Any) -> list[tuple[str, float, bytes]]:
    rows: list[tuple[str, float, bytes]] = connection.execute(
        "SELECT key, at, reply FROM idempotency ORDER BY at"
    ).fetchall()
    return rows
