"""Who sends which piece to whom. Pure: every rank computes the same plan from the same few values.

A piece is a chunk with the sender that owns it. For each piece a rank has at most one leg: where it gets the piece (or that it owns
it), and to whom it passes it on. All ranks take their legs in one global order of pieces, round-robin over the senders;
together with windows of at least one message this rules out deadlock: the first unfinished piece is posted everywhere.

    star      every sender sends its pieces to every receiver                 max(R/S, 1)·M/B: bound by a sender's or a receiver's link
    chain     senders → r0 → r1 → …, pipelined                                M/B + (R−1)(α + c/B): every link carries M, whatever R is
    striped   a chain per sender, each beginning at another receiver          the same, and no receiver takes all first hops

M bytes, S sending nodes, R receivers (one per node; replicas of a node share its copy), links of B bytes/s in each direction, α
seconds per hop, chunks of c bytes. ``docs/scaling-weights.md`` fits the formulas to measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hpcrl.errors import DataError
from hpcrl.weights.manifest import cut

__all__ = ["Algorithm", "Leg", "LinkRate", "Piece", "best_chunk", "choose", "cut_spans", "legs_of", "predict"]

Algorithm = Literal["star", "chain", "striped"]

_LEAST_CHUNK = 256 << 10
"""Below this the cost per message, not the link, decides."""
_STAGES = 64
"""Chunks of a transfer without hops: digests and transfer overlap, and the last digest is 1/64 of the work."""


@dataclass(frozen=True, slots=True)
class LinkRate:
    """One node's link: bytes per second in each direction, seconds that a hop adds (latency, software)."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``offset … offset + nbytes`` of the flat copy, held by ``sender`` (an MPI rank)."""

    offset: int
    nbytes: int
    sender: int


@dataclass(frozen=True, slots=True)
class Leg:
    """One rank's part in moving one piece: ``source`` is None at its owner; ``dests`` get it from here."""

    piece: int
    source: int | None
    dests: tuple[int, ...]


def cut_spans(spans: Mapping[int, Sequence[tuple[int, int]]], nbytes: int, chunk_bytes: int) -> tuple[Piece, ...]:
    """Cut what each sender holds, (offset, nbytes) pairs, into pieces of at most ``chunk_bytes``, in order of offset.

    Raises DataError unless the spans cover ``nbytes`` bytes exactly once, UserError for an impossible chunk size.
    """
    pieces: list[Piece] = []
    end = 0
    for offset, size, sender in sorted((o, n, sender) for sender, held in spans.items() for o, n in held if n):
        if offset != end:
            what = "nobody holds" if offset > end else "two trainers hold"
            raise DataError("weights_shares", f"{what} the bytes at {min(offset, end)} of {nbytes}")
        end = offset + size
        pieces += [Piece(offset + start, length, sender) for start, length in cut(size, chunk_bytes)]
    if end != nbytes:
        raise DataError("weights_shares", f"nobody holds the bytes from {end} to {nbytes}")
    return tuple(pieces)


def predict(algorithm: Algorithm, nbytes: int, chunk_bytes: int, senders: int, receivers: int, link: LinkRate) -> float:
    """Seconds until the last receiver has the last byte."""
    hop = link.latency_s + min(chunk_bytes, nbytes) / link.bytes_per_s
    whole = nbytes / link.bytes_per_s
    if algorithm == "star":
        return max(receivers / senders, 1.0) * whole + link.latency_s
    return whole + (receivers - 1) * hop + link.latency_s


def choose(nbytes: int, chunk_bytes: int, senders: int, receivers: int, link: LinkRate) -> Algorithm:
    """The algorithm with the shortest prediction; the star, which depends on no receiver, where they are equal."""
    chained: Algorithm = "striped" if senders > 1 else "chain"
    times = {name: predict(name, nbytes, chunk_bytes, senders, max(receivers, 1), link) for name in ("star", chained)}
    return chained if times[chained] < times["star"] else "star"


def best_chunk(nbytes: int, receivers: int, link: LinkRate, largest: int) -> int:
    """Chunk size that makes a chain's time least, √(M·α·B/(R−1)), but enough pieces to overlap digests; at most ``largest``."""
    stages = nbytes / _STAGES
    if receivers > 1:
        stages = min(stages, math.sqrt(nbytes * link.latency_s * link.bytes_per_s / (receivers - 1)))
    return min(largest, max(_LEAST_CHUNK, int(stages)))


def legs_of(rank: int, pieces: Sequence[Piece], receivers: Sequence[int], algorithm: Algorithm) -> list[Leg]:
    """The legs of ``rank`` in global order. Ranks outside the transfer have none."""
    owned: dict[int, list[int]] = {}
    for number, piece in enumerate(pieces):
        owned.setdefault(piece.sender, []).append(number)
    turns = []
    for index, sender in enumerate(sorted(owned)):
        route = _route(rank, index, len(owned), sender, receivers, algorithm)
        if route is not None:
            turns += [(level, index, Leg(number, *route)) for level, number in enumerate(owned[sender])]
    return [leg for _, _, leg in sorted(turns, key=lambda turn: turn[:2])]


def _route(
    rank: int, index: int, senders: int, sender: int, receivers: Sequence[int], algorithm: Algorithm
) -> tuple[int | None, tuple[int, ...]] | None:
    """(source, dests) of ``rank`` for the pieces of sender number ``index``, or None when it has no part in them."""
    if not receivers:
        return None
    turn = index * len(receivers) // senders if algorithm == "striped" else 0
    path = [sender, *receivers[turn:], *receivers[:turn]]
    if rank not in path:
        return None
    place = path.index(rank)
    if algorithm == "star":
        return (None, tuple(path[1:])) if place == 0 else (sender, ())
    following = tuple(path[place + 1 : place + 2])
    return (None, following) if place == 0 else (path[place - 1], following)
