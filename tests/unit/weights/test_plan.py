from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.errors import UserError
from hpcrl.weights.plan import Algorithm, Leg, choose, legs_of, stripes

worlds = st.tuples(st.integers(0, 40), st.integers(1, 5), st.integers(0, 6), st.sampled_from(["star", "chain"]))


def all_legs(chunks: int, senders: int, receivers: int, algorithm: Algorithm) -> dict[int, list[Leg]]:
    shares = stripes(chunks, range(senders))
    ranks = list(range(senders, senders + receivers))
    return {rank: legs_of(rank, shares, ranks, algorithm) for rank in range(senders + receivers + 1)}


@given(worlds)
def test_every_receiver_gets_every_chunk_exactly_once(world: tuple[int, int, int, Algorithm]) -> None:
    chunks, senders, receivers, _ = world
    legs = all_legs(*world)
    for rank in range(senders, senders + receivers):
        assert sorted(leg.chunk for leg in legs[rank]) == list(range(chunks))
        sent_here = [leg.chunk for other in legs.values() for leg in other if rank in leg.dests]
        assert sorted(sent_here) == list(range(chunks))
    assert legs[senders + receivers] == []


@given(worlds)
def test_sources_and_dests_agree_and_lead_back_to_the_owner(world: tuple[int, int, int, Algorithm]) -> None:
    senders = world[1]
    by_rank = {rank: {leg.chunk: leg for leg in legs} for rank, legs in all_legs(*world).items()}
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
    reference = max((tuple(leg.chunk for leg in mine) for mine in legs.values()), key=len)
    for mine in legs.values():
        order = [reference.index(leg.chunk) for leg in mine]
        assert order == sorted(order)


@given(st.integers(0, 1000), st.lists(st.integers(0, 99), min_size=1, max_size=9, unique=True))
def test_stripes_are_even_and_contiguous(chunks: int, senders: list[int]) -> None:
    shares = stripes(chunks, senders)
    end = 0
    for share in shares:
        assert share.first == end
        end += share.count
    assert end == chunks
    assert max(s.count for s in shares) - min(s.count for s in shares) <= 1


def test_chain_has_one_receiver_per_hop_and_rotates() -> None:
    legs = all_legs(2, 2, 2, "chain")
    assert legs[0] == [Leg(0, None, (2,))]
    assert legs[1] == [Leg(1, None, (3,))]
    assert legs[2] == [Leg(0, 0, (3,)), Leg(1, 3, ())]
    assert legs[3] == [Leg(0, 2, ()), Leg(1, 1, (2,))]


@pytest.mark.parametrize(
    ("chunks", "senders", "receivers", "expected"),
    [
        (64, 1, 1, "star"),
        (64, 1, 2, "chain"),
        (64, 4, 4, "star"),
        (64, 2, 8, "chain"),
        (1, 1, 3, "star"),
        (0, 1, 3, "star"),
    ],
)
def test_choice(chunks: int, senders: int, receivers: int, expected: str) -> None:
    assert choose(chunks, senders, receivers) == expected


def test_no_sender() -> None:
    with pytest.raises(UserError):
        stripes(3, [])
