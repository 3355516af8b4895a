"""Moving chunks along a plan: bounded receives and sends under way, every chunk passed on as soon as it has arrived.

A :class:`Transfer` is one rank's part of one transfer, advanced by :meth:`Transfer.step` and never blocking:

    own chunk      ─ window of sends ─▶ dests
    foreign chunk  ─ window of receives ─▶ on_chunk (digest) ─▶ sends to its dests, at once

Why it cannot stall: legs are taken in an order that all ranks share. Take the first chunk that some rank still lacks. All earlier ones
are everywhere, so that rank has posted its receive; whoever holds the chunk has posted the send (an owner because its earlier sends are
done, others because they forward at once and without a bound). So some message always completes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hpcrl.weights.plan import Leg

__all__ = ["Link", "Transfer"]


class Link(Protocol):
    """Point-to-point messages between ranks (:class:`hpcrl.weights.mpi.World`, or a fake)."""

    def isend(self, data: memoryview, dest: int, tag: int) -> Any: ...

    def irecv(self, data: memoryview, source: int, tag: int) -> Any: ...

    def completed(self, requests: Sequence[Any]) -> list[int]: ...


class Transfer:
    """``buffer`` is the flat copy (read at owners, written at receivers); ``chunks`` are (offset, nbytes) by chunk number.

    ``on_chunk(number, bytes)`` is called once for each chunk received, in order of arrival.
    """

    def __init__(
        self,
        link: Link,
        legs: Sequence[Leg],
        buffer: memoryview,
        chunks: Sequence[tuple[int, int]],
        window: int,
        on_chunk: Callable[[int, memoryview], None] | None = None,
    ) -> None:
        self._link = link
        self._legs = legs
        self._next = 0
        self._buffer = buffer
        self._chunks = chunks
        self._window = max(1, window)
        self._on_chunk = on_chunk
        self._unsent: list[tuple[int, int]] = []
        self._sends: list[Any] = []
        self._receives: list[tuple[Any, Leg]] = []

    @property
    def done(self) -> bool:
        """Whether everything has been received and has left."""
        return self._next == len(self._legs) and not (self._receives or self._sends or self._unsent)

    def step(self) -> bool:
        """Post what may be posted, collect what has completed; False when nothing moved."""
        moved = self._post()
        moved |= self._collect_receives()
        moved |= self._collect_sends()
        return moved

    def _bytes(self, chunk: int) -> memoryview:
        offset, nbytes = self._chunks[chunk]
        return self._buffer[offset : offset + nbytes]

    def _post(self) -> bool:
        moved = False
        while True:
            while self._unsent and len(self._sends) < self._window:
                chunk, dest = self._unsent.pop(0)
                self._sends.append(self._link.isend(self._bytes(chunk), dest, chunk))
                moved = True
            if self._next == len(self._legs) or self._unsent or len(self._receives) >= self._window:
                return moved
            leg = self._legs[self._next]
            self._next += 1
            if leg.source is None:
                self._unsent = [(leg.chunk, dest) for dest in leg.dests]
            else:
                self._receives.append((self._link.irecv(self._bytes(leg.chunk), leg.source, leg.chunk), leg))
                moved = True

    def _collect_receives(self) -> bool:
        if not self._receives:
            return False
        finished = set(self._link.completed([request for request, _ in self._receives]))
        for index in sorted(finished):
            leg = self._receives[index][1]
            data = self._bytes(leg.chunk)
            for dest in leg.dests:
                self._sends.append(self._link.isend(data, dest, leg.chunk))
            if self._on_chunk is not None:
                self._on_chunk(leg.chunk, data)
        self._receives = [pair for index, pair in enumerate(self._receives) if index not in finished]
        return bool(finished)

    def _collect_sends(self) -> bool:
        if not self._sends:
            return False
        finished = set(self._link.completed(self._sends))
        self._sends = [request for index, request in enumerate(self._sends) if index not in finished]
        return bool(finished)
