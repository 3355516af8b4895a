"""SQLite under the queue: one connection in one thread, group commit.

    event loop ──submit(changes, answer)──▶ queue ──▶ writer thread: take all that wait, one transaction, commit
               ◀──────── future done after the commit ────────┘       (the next ones gather meanwhile)

So the number of commits per second is that of the disk, whatever the number of calls, and nothing is answered before it is
durable. Rows that several calls of one commit replaced are written once. Any write error is final: what is in memory can no longer
be trusted, the process must end and be restarted on the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, TypeVar

from hpcrl.coordinator.changes import ChangeSet
from hpcrl.coordinator.tables import TABLES, Row
from hpcrl.errors import EnvironmentFault, HpcrlError

__all__ = ["Answer", "Rows", "Store", "write_changes"]

T = TypeVar("T")
_MOST_PER_COMMIT = 4096
_MOST_PER_STATEMENT = 64


@dataclass(frozen=True, slots=True)
class Answer:
    """The first answer of a mutating call, kept under its idempotency key in the call's own transaction."""

    key: str
    at: float
    reply: bytes


@dataclass(slots=True)
class _Job:
    """Either rows to write, or a function to run on the connection between two transactions."""

    done: asyncio.Future[Any]
    changes: ChangeSet | None = None
    answer: Answer | None = None
    function: Callable[[sqlite3.Connection], Any] | None = None


class Rows:
    """Rows of several calls on their way into one transaction: of a row that later calls replace, only the last is written."""

    def __init__(self) -> None:
        self._keyed: dict[str, dict[Row, Row]] = {}
        self._appended: dict[str, list[Row]] = {}

    def add(self, name: str, rows: list[Row]) -> None:
        width = TABLES[name].replaces
        if width:
            self._keyed.setdefault(name, {}).update((row[:width], row) for row in rows)
        else:
            self._appended.setdefault(name, []).extend(rows)

    def write(self, connection: sqlite3.Connection) -> None:
        for name, keyed in self._keyed.items():
            _insert(connection, name, list(keyed.values()))
        for name, rows in self._appended.items():
            _insert(connection, name, rows)
        self._keyed, self._appended = {}, {}


def _insert(connection: sqlite3.Connection, name: str, rows: list[Row]) -> None:
    """Many rows per statement: each statement waits for the interpreter's lock, which the event loop holds most of the time.

    The numbers of rows are powers of two, so that few statements are compiled and all stay in the connection's cache.
    """
    start, count = 0, _MOST_PER_STATEMENT
    while start < len(rows):
        while count > len(rows) - start:
            count //= 2
        connection.execute(_statement(name, count), [*chain.from_iterable(rows[start : start + count])])
        start += count


@cache
def _statement(name: str, count: int) -> str:
    return TABLES[name].write(count)


def write_changes(connection: sqlite3.Connection, changes: ChangeSet, rows: Rows | None = None) -> None:
    """Write one call's rows, or gather them in ``rows`` to be written later; the caller holds the transaction."""
    gathered = Rows() if rows is None else rows
    if changes.unconsume_after is not None:
        gathered.write(connection)
        connection.execute("DELETE FROM consumptions WHERE step > ?", (changes.unconsume_after,))
    for name, new in changes.rows.items():
        gathered.add(name, new)
    if rows is None:
        gathered.write(connection)


class Store:
    """Owns the connection from :meth:`start` to :meth:`close`. All methods are called on the event loop."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._last: asyncio.Future[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="coordinator-store", daemon=True)
        self.commits = 0
        self.broken: str | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, changes: ChangeSet | None, answer: Answer | None = None) -> None:
        """Queue rows for the next commit; await :meth:`committed` to know that they are durable."""
        self._put(_Job(self._future(), changes, answer))

    async def committed(self) -> None:
        """Return when everything submitted so far is durable. Raises EnvironmentFault after a write error."""
        if self._last is not None:
            await asyncio.shield(self._last)

    async def call(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``function`` on the connection, after everything submitted so far."""
        job = _Job(self._future(), function=function)
        self._put(job)
        result: T = await asyncio.shield(job.done)
        return result

    async def close(self) -> None:
        """Commit what waits and close the database."""
        self._jobs.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def _future(self) -> asyncio.Future[Any]:
        if self._loop is None:
            raise RuntimeError("Store.start() has not been called")
        return self._loop.create_future()

    def _put(self, job: _Job) -> None:
        if self.broken is not None:
            raise EnvironmentFault(self.broken)
        self._last = job.done
        self._jobs.put(job)

    # ------------------------------------------------------------ writer thread

    def _run(self) -> None:
        while (jobs := self._gather()) is not None:
            error: EnvironmentFault | None = None
            results: list[Any] = []
            try:
                if (
                    self.broken is not None
                ):  # queued before the error was known: must not be durable without what it saw
                    raise EnvironmentFault(self.broken)
                results = self._commit(jobs)
            except EnvironmentFault as caught:
                error = caught
            except (
                sqlite3.Error,
                HpcrlError,
                ValueError,
                KeyError,
                TypeError,
            ) as caught:  # all but the first: rows that cannot be read
                error = EnvironmentFault(f"the coordinator's database cannot be used: {caught!r}; is the disk full?")
            if error is not None:
                self.broken = str(error)
                self._roll_back()
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(_resolve, jobs, results, error)
        self._connection.close()

    def _roll_back(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # the first error is the one to tell
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def _gather(self) -> list[_Job] | None:
        """All jobs that wait (at least one), or None at the end."""
        jobs: list[_Job] = []
        job = self._jobs.get()
        while job is not None:
            jobs.append(job)
            if len(jobs) >= _MOST_PER_COMMIT:
                return jobs
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return jobs
        if jobs:
            self._jobs.put(None)
        return jobs or None

    def _commit(self, jobs: list[_Job]) -> list[Any]:
        connection, rows = self._connection, Rows()
        results: list[Any] = []
        connection.execute("BEGIN")
        for job in jobs:
            if job.function is not None:
                rows.write(connection)  # it sees everything submitted before it
                results.append(job.function(connection))
                continue
            results.append(None)
            if job.changes is not None:
                write_changes(connection, job.changes, rows)
            if job.answer is not None:
                rows.add("idempotency", [(job.answer.key, job.answer.at, job.answer.reply)])
        rows.write(connection)
        connection.execute("COMMIT")
        self.commits += 1
        return results


def _resolve(jobs: list[_Job], results: list[Any], error: EnvironmentFault | None) -> None:
    for index, job in enumerate(jobs):
        if job.done.done():
            continue
        if error is None:
            job.done.set_result(results[index])
        else:
            job.done.set_exception(error)
            job.done.exception()  # marks it as seen: not every caller waits for its own job
