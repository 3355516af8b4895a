"""One trainer rank's bytes of one version: their digests, and their way to the replicas."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future

from hpcrl.weights.digest import chunk_digest
from hpcrl.weights.mpi import World, wait_until
from hpcrl.weights.plan import Algorithm, Piece, legs_of
from hpcrl.weights.snapshot import Snapshot
from hpcrl.weights.transfer import Transfer

__all__ = ["Outgoing"]


class Outgoing:
    """``pieces`` are those of all trainers; this rank sends its own out of the snapshot."""

    def __init__(self, world: World, snapshot: Snapshot, pieces: Sequence[Piece], window: int) -> None:
        self._world = world
        self._snapshot = snapshot
        self.pieces = pieces
        self._window = window
        self.transfer_s = 0.0

    def digest(self, threads: Executor) -> list[Future[str]]:
        """Begin to take the digests of the own pieces, in order."""
        own = (piece for piece in self.pieces if piece.sender == self._world.rank)
        return [threads.submit(chunk_digest, self._snapshot.piece(piece.offset, piece.nbytes)) for piece in own]

    def send(
        self, receivers: Sequence[int], algorithm: Algorithm, meanwhile: Callable[[], bool], timeout_s: float
    ) -> None:
        """Send the own pieces to ``receivers``; returns when all have left the buffer. ``meanwhile`` gets a turn between steps."""
        started = time.monotonic()
        legs = legs_of(self._world.rank, self.pieces, receivers, algorithm)
        transfer = Transfer(self._world, legs, self._bytes, self._window)

        def turn() -> bool:
            return transfer.step() | meanwhile()

        def complaint() -> str:
            return f"{', '.join(self._world.names[rank] for rank in sorted(transfer.waits_for))} took no chunk"

        wait_until(lambda: transfer.done, turn, timeout_s, complaint)
        self.transfer_s += time.monotonic() - started

    def _bytes(self, number: int) -> memoryview:
        piece = self.pieces[number]
        return self._snapshot.piece(piece.offset, piece.nbytes)
