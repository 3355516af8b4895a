from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.errors import DataError, UserError
from hpcrl.weights.plan import Algorithm, Leg, LinkRate, best_chunk, choose, cut_spans, legs_of, predict

ALGORITHMS = ["star", "chain", "striped"]
worlds = st.tuples(st.integers(0, 40), st.integers(1, 5), st.integers(0, 6), st.sampled_from(ALGORITHMS))
GIGABIT = LinkRate(120e6, 200e-6)
MIB = 1 << 20


def even_spans(nbytes: int, senders: int) -> dict[int, list[tuple[int, int]]]:
    ends = [nbytes * index // senders for index in range(senders + 1)]
    return {index: [(ends[index], ends[index + 1] - ends[index])] for index in range(senders)}


def all_legs(chunks: int, senders: int, receivers: int, algorithm: Algorithm) -> dict[int, list[Leg]]:
    pieces = cut_spans(even_spans(chunks, senders), chunks, 1)
    ranks = list(range(senders, senders + receivers))
    return {rank: legs_of(rank, pieces, ranks, algorithm) for rank in range(senders + receivers + 1)}


@given(worlds)
def test_every_receiver_gets_every_chunk_exactly_once(world: tuple[int, int, int, Algorithm]) -> None:
    chunks, senders, receivers, _ = world
    legs = all_legs(*world)
    for rank in range(senders, senders + receivers):
        assert sorted(leg.piece for leg in legs[rank]) == list(range(chunks))
        sent_here = [leg.piece for other in legs.values() for leg in other if rank in leg.dests]
        assert sorted(sent_here) == list(range(chunks))
    assert legs[senders + receivers] == []


@given(worlds)
def test_sources_and_dests_agree_and_lead_back_to_the_owner(world: tuple[int, int, int, Algorithm]) -> None:
    senders = world[1]
    by_rank = {rank: {leg.piece: leg for leg in legs} for rank, legs in all_legs(*world).items()}
    for rank, legs in by_rank.items():
        for chunk in legs:
            way, here = [rank], rank
            while (source := by_rank[here][chunk].source) is not None:
                assert here in by_rank[source][chunk].dests
                assert source not in way  # the way back has no loop, so nobody forwards before having it
                way.append(source)
                here = source
            assert here < senders


@given(worlds)
def test_all_ranks_share_one_order(world: tuple[int, int, int, Algorithm]) -> None:
    legs = all_legs(*world)
    reference = max((tuple(leg.piece for leg in mine) for mine in legs.values()), key=len)
    for mine in legs.values():
        order = [reference.index(leg.piece) for leg in mine]
        assert order == sorted(order)


@given(st.integers(0, 300), st.integers(1, 4), st.integers(1, 50), st.randoms())
def test_pieces_cover_everything_once_and_stay_with_their_holder(
    nbytes: int, senders: int, chunk: int, rng: random.Random
) -> None:
    cuts = sorted({0, nbytes, *(rng.randint(0, nbytes) for _ in range(6))})
    spans: dict[int, list[tuple[int, int]]] = {sender: [] for sender in range(senders)}
    for first, last in pairwise(cuts):
        spans[rng.randrange(senders)].append((first, last - first))
    pieces = cut_spans(spans, nbytes, chunk)
    end = 0
    for piece in pieces:
        assert piece.offset == end and 0 < piece.nbytes <= chunk
        assert any(o <= piece.offset and piece.offset + piece.nbytes <= o + n for o, n in spans[piece.sender])
        end += piece.nbytes
    assert end == nbytes


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ({0: [(0, 4)], 1: [(3, 7)]}, "two trainers hold the bytes at 3 of 10"),
        ({0: [(0, 4)], 1: [(5, 5)]}, "nobody holds the bytes at 4 of 10"),
        ({0: [(0, 4)], 1: []}, "nobody holds the bytes from 4 to 10"),
    ],
)
def test_parts_that_are_not_the_whole_are_refused(spans: dict[int, list[tuple[int, int]]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        cut_spans(spans, 10, 3)


@pytest.mark.parametrize("chunk", [0, (1 << 30) + 1])
def test_impossible_chunk_sizes(chunk: int) -> None:
    with pytest.raises(UserError, match="chunk"):
        cut_spans({0: [(0, 10)]}, 10, chunk)


def test_a_chain_is_one_path_for_all_senders() -> None:
    legs = all_legs(2, 2, 2, "chain")
    assert legs[2] == [Leg(0, 0, (3,)), Leg(1, 1, (3,))]
    assert legs[3] == [Leg(0, 2, ()), Leg(1, 2, ())]


def test_stripes_begin_at_different_receivers() -> None:
    legs = all_legs(2, 2, 2, "striped")
    assert legs[0] == [Leg(0, None, (2,))]
    assert legs[1] == [Leg(1, None, (3,))]
    assert legs[2] == [Leg(0, 0, (3,)), Leg(1, 3, ())]
    assert legs[3] == [Leg(0, 2, ()), Leg(1, 1, (2,))]


@pytest.mark.parametrize(
    ("mib", "senders", "receivers", "expected"),
    [
        (256, 1, 1, "star"),
        (256, 1, 2, "chain"),
        (256, 4, 4, "star"),
        (256, 2, 8, "striped"),
        (0, 1, 3, "star"),
        (256, 1, 0, "star"),
    ],
)
def test_choice(mib: int, senders: int, receivers: int, expected: str) -> None:
    assert choose(mib * MIB, MIB, senders, receivers, GIGABIT) == expected


def test_few_large_chunks_or_a_slow_hop_make_the_star_better() -> None:
    assert choose(16 * MIB, 16 * MIB, 1, 3, GIGABIT) == "star"
    assert choose(16 * MIB, MIB, 1, 3, LinkRate(120e6, 0.2)) == "star"
    assert choose(16 * MIB, MIB, 1, 3, GIGABIT) == "chain"


@given(st.integers(20, 40), st.integers(2, 512), st.floats(1e8, 1e11), st.floats(1e-6, 1e-3))
def test_no_chunk_size_is_much_better_than_the_best(
    log_bytes: int, receivers: int, rate: float, latency: float
) -> None:
    nbytes, link = 1 << log_bytes, LinkRate(rate, latency)

    def chain(chunk: int) -> float:  # every message costs the latency once, as in the model that the size minimises
        return (nbytes / chunk + receivers - 1) * (latency + chunk / rate)

    best = best_chunk(nbytes, receivers, link, largest=1 << 40)
    others = [size for power in range(18, log_bytes) if nbytes / (size := 1 << power) >= 64]
    assert all(chain(best) <= chain(other) * 1.001 for other in others)


def test_chunk_limits() -> None:
    assert best_chunk(1 << 40, 1, GIGABIT, largest=16 * MIB) == 16 * MIB
    assert best_chunk(1 << 40, 4, GIGABIT, largest=1024) == 1024
    assert best_chunk(1000, 4, GIGABIT, largest=16 * MIB) == 256 << 10


def test_prediction_of_the_bounds() -> None:
    whole = 256 * MIB / GIGABIT.bytes_per_s
    assert predict("star", 256 * MIB, MIB, 1, 4, GIGABIT) == pytest.approx(4 * whole, rel=1e-3)
    assert predict("chain", 256 * MIB, MIB, 1, 4, GIGABIT) == pytest.approx(whole * (1 + 3 / 256), rel=1e-2)
