"""The executor over a fake network with rendezvous semantics: a send completes only when its receive is posted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.weights.plan import Algorithm, cut_spans, legs_of
from hpcrl.weights.transfer import Transfer


@dataclass(eq=False)
class Half:
    source: int
    dest: int
    tag: int
    data: memoryview
    done: bool = False
    reported: bool = False


@dataclass
class Network:
    sends: list[Half] = field(default_factory=list)
    receives: list[Half] = field(default_factory=list)
    most_receives: int = 0

    def deliver_one(self, rng: random.Random) -> bool:
        pairs = [
            (send, receive)
            for send in self.sends
            for receive in self.receives
            if (send.source, send.dest, send.tag) == (receive.source, receive.dest, receive.tag)
        ]
        if not pairs:
            return False
        send, receive = rng.choice(pairs)
        receive.data[:] = send.data
        send.done = receive.done = True
        self.sends.remove(send)
        self.receives.remove(receive)
        return True


class FakeLink:
    def __init__(self, network: Network, rank: int) -> None:
        self._network, self._rank = network, rank

    def isend(self, data: memoryview, dest: int, tag: int) -> Half:
        half = Half(self._rank, dest, tag, data)
        self._network.sends.append(half)
        return half

    def irecv(self, data: memoryview, source: int, tag: int) -> Half:
        half = Half(source, self._rank, tag, data)
        self._network.receives.append(half)
        mine = sum(r.dest == self._rank for r in self._network.receives)
        self._network.most_receives = max(self._network.most_receives, mine)
        return half

    def completed(self, requests: Sequence[Half]) -> list[int]:
        return [index for index, half in enumerate(requests) if half.done]


@settings(max_examples=150, deadline=None)
@given(
    nbytes=st.integers(0, 300),
    chunk_bytes=st.integers(7, 60),
    senders=st.integers(1, 4),
    receivers=st.integers(1, 5),
    algorithm=st.sampled_from(["star", "chain", "striped"]),
    window=st.integers(1, 3),
    seed=st.integers(0, 9999),
)
def test_all_bytes_arrive_and_nothing_stalls(
    nbytes: int, chunk_bytes: int, senders: int, receivers: int, algorithm: Algorithm, window: int, seed: int
) -> None:
    rng = random.Random(seed)
    data = rng.randbytes(nbytes)
    ends = [nbytes * index // senders for index in range(senders + 1)]
    spans = {index: [(ends[index], ends[index + 1] - ends[index])] for index in range(senders)}
    pieces = cut_spans(spans, nbytes, chunk_bytes)
    ranks = list(range(senders, senders + receivers))
    network = Network()
    arrived: dict[int, list[int]] = {rank: [] for rank in ranks}
    buffers = [bytearray(data) if rank < senders else bytearray(nbytes) for rank in range(senders + receivers)]

    def transfer(rank: int) -> Transfer:
        def on_chunk(number: int, chunk: memoryview) -> None:
            piece = pieces[number]
            assert bytes(chunk) == data[piece.offset : piece.offset + piece.nbytes]
            arrived[rank].append(number)

        def bytes_of(number: int) -> memoryview:
            piece = pieces[number]
            return memoryview(buffers[rank])[piece.offset : piece.offset + piece.nbytes]

        legs = legs_of(rank, pieces, ranks, algorithm)
        return Transfer(FakeLink(network, rank), legs, bytes_of, window, on_chunk)

    transfers = [transfer(rank) for rank in range(senders + receivers)]
    while not all(t.done for t in transfers):
        moved = [t.step() for t in rng.sample(transfers, len(transfers))]
        assert network.deliver_one(rng) or any(moved), "stalled"
    assert all(bytes(buffer) == data for buffer in buffers)
    assert all(sorted(numbers) == list(range(len(pieces))) for numbers in arrived.values())
    assert network.most_receives <= window


@pytest.mark.parametrize("window", [1, 4])
def test_a_sender_keeps_a_bounded_number_of_messages_under_way(window: int) -> None:
    network, buffer = Network(), memoryview(bytearray(100))
    legs = legs_of(0, cut_spans({0: [(0, 100)]}, 100, 10), [1, 2], "star")
    sender = Transfer(FakeLink(network, 0), legs, lambda number: buffer[10 * number : 10 * number + 10], window)
    for _ in range(5):
        sender.step()
    assert len(network.sends) == window and not sender.done
    assert sender.waits_for <= {1, 2} and sender.waits_for
