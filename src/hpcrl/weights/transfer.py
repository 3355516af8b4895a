"""Moving pieces along a plan: bounded receives and sends under way, every piece passed on as soon as it has arrived.

A :class:`Transfer` is one rank's part of one transfer, advanced by :meth:`Transfer.step` and never blocking:

    own piece      ─ window of sends ─▶ dests
    foreign piece  ─ window of receives ─▶ sends to its dests, at once ─▶ on_piece (digest)

Why it cannot stall: legs are taken in an order that all ranks share. Take the first piece that some rank still lacks. All earlier ones
are everywhere, so that rank has posted its receive; whoever holds the piece has posted the send (an owner because its earlier sends are
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
    """``bytes_of(piece)`` is the memory of a piece by its number: read at its owner, written at receivers.

    ``on_piece(number, bytes)`` is called once for each piece received, in order of arrival.
    """

    def __init__(
        self,
        link: Link,
        legs: Sequence[Leg],
        bytes_of: Callable[[int], memoryview],
        window: int,
        on_piece: Callable[[int, memoryview], None] | None = None,
    ) -> None:
        self._link = link
        self._legs = legs
        self._next = 0
        self._bytes = bytes_of
        self._window = max(1, window)
        self._on_piece = on_piece
        self._unsent: list[tuple[int, int]] = []
        self._sends: list[tuple[Any, int]] = []
        self._receives: list[tuple[Any, Leg]] = []

    @property
    def done(self) -> bool:
        """Whether everything has been received and has left."""
        return self._next == len(self._legs) and not (self._receives or self._sends or self._unsent)

    @property
    def waits_for(self) -> set[int]:
        """Ranks that have not yet taken or sent what is under way."""
        return {dest for _, dest in self._sends} | {leg.source for _, leg in self._receives if leg.source is not None}

    def step(self) -> bool:
        """Post what may be posted, collect what has completed; False when nothing moved."""
        moved = self._post()
        moved |= self._collect_receives()
        moved |= self._collect_sends()
        return moved

    def _send(self, piece: int, dest: int) -> None:
        self._sends.append((self._link.isend(self._bytes(piece), dest, piece), dest))

    def _post(self) -> bool:
        moved = False
        while True:
            while self._unsent and len(self._sends) < self._window:
                self._send(*self._unsent.pop(0))
                moved = True
            if self._next == len(self._legs) or self._unsent or len(self._receives) >= self._window:
                return moved
            leg = self._legs[self._next]
            self._next += 1
            if leg.source is None:
                self._unsent = [(leg.piece, dest) for dest in leg.dests]
            else:
                self._receives.append((self._link.irecv(self._bytes(leg.piece), leg.source, leg.piece), leg))
                moved = True

    def _collect_receives(self) -> bool:
        if not self._receives:
            return False
        finished = set(self._link.completed([request for request, _ in self._receives]))
        for index in sorted(finished):
            leg = self._receives[index][1]
            for dest in leg.dests:
                self._send(leg.piece, dest)
            if self._on_piece is not None:
                self._on_piece(leg.piece, self._bytes(leg.piece))
        self._receives = [pair for index, pair in enumerate(self._receives) if index not in finished]
        return bool(finished)

    def _collect_sends(self) -> bool:
        if not self._sends:
            return False
        finished = set(self._link.completed([request for request, _ in self._sends]))
        self._sends = [pair for index, pair in enumerate(self._sends) if index not in finished]
        return bool(finished)
