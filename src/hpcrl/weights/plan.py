"""Who sends which piece to whom. Pure: every rank computes the same plan from the same few values, and no plan is ever sent.

A piece is a chunk with the sender that owns it. For each piece a rank has at most one leg: where it gets the piece (or that it owns
it), and to whom it passes it on. All ranks take their legs in one global order of pieces, round-robin over the senders' stripes;
together with windows of at least one message this rules out deadlock: the first unfinished piece is posted everywhere.

    star    every sender sends its pieces to every receiver                    S/R of the wire per sender, R·M/S bytes sent by each
    chain   sender → r0 → r1 → …, pipelined; each sender's chain is rotated    each link carries about M, whatever R is
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpcrl.errors import UserError

__all__ = ["Algorithm", "Leg", "Stripe", "choose", "legs_of", "stripes"]

Algorithm = Literal["star", "chain"]


@dataclass(frozen=True, slots=True)
class Stripe:
    """Consecutive chunks ``first … first + count - 1`` owned by ``sender`` (an MPI rank)."""

    sender: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Leg:
    """One rank's part in moving one chunk: ``source`` is None at its owner; ``dests`` get it from here."""

    chunk: int
    source: int | None
    dests: tuple[int, ...]


def stripes(chunks: int, senders: Sequence[int]) -> tuple[Stripe, ...]:
    """Share out chunks evenly, each sender a contiguous range (it then copies and digests only the tensors in it)."""
    if not senders:
        raise UserError("a transfer needs at least one sender")
    base, extra = divmod(chunks, len(senders))
    shares, first = [], 0
    for index, sender in enumerate(senders):
        count = base + (index < extra)
        shares.append(Stripe(sender, first, count))
        first += count
    return tuple(shares)


def choose(chunks: int, senders: int, receivers: int) -> Algorithm:
    """The faster algorithm in units of one chunk on one full-duplex link.

    A star is bound by what a sender sends (or a receiver takes), a chain by what a receiver takes plus filling the pipeline.
    """
    star = max(receivers * -(-chunks // senders), chunks)
    chain = chunks + receivers - 1
    return "chain" if chain < star else "star"


def legs_of(rank: int, shares: Sequence[Stripe], receivers: Sequence[int], algorithm: Algorithm) -> list[Leg]:
    """The legs of ``rank`` in global order. Ranks outside the transfer have none."""
    routes = [
        _route(rank, index, len(shares), share.sender, receivers, algorithm) for index, share in enumerate(shares)
    ]
    legs = []
    for level in range(max((share.count for share in shares), default=0)):
        for share, route in zip(shares, routes, strict=True):
            if route is not None and level < share.count:
                legs.append(Leg(share.first + level, *route))
    return legs


def _route(
    rank: int, index: int, senders: int, sender: int, receivers: Sequence[int], algorithm: Algorithm
) -> tuple[int | None, tuple[int, ...]] | None:
    """(source, dests) of ``rank`` for the stripe of sender number ``index``, or None when it has no part in it."""
    if not receivers:
        return None
    turn = index * len(receivers) // senders
    path = [sender, *receivers[turn:], *receivers[:turn]]
    if rank not in path:
        return None
    place = path.index(rank)
    if algorithm == "star":
        return (None, tuple(path[1:])) if place == 0 else (sender, ())
    following = tuple(path[place + 1 : place + 2])
    return (None, following) if place == 0 else (path[place - 1], following)
