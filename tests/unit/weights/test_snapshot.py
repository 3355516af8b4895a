from __future__ import annotations

import pytest
import torch
from torch import nn

from hpcrl.errors import UserError
from hpcrl.weights.plan import cut_spans
from hpcrl.weights.snapshot import Snapshot, model_tensors


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("cache", torch.ones(3), persistent=False)


def read(snapshot: Snapshot, name: str) -> torch.Tensor:
    entry = next(t for t in snapshot.layout.tensors if t.name == name)
    raw = bytearray(snapshot.view[entry.offset : entry.offset + entry.nbytes])
    return torch.frombuffer(raw, dtype=getattr(torch, entry.dtype)).view(entry.shape)


def test_tied_once_and_persistent_buffers() -> None:
    names = [name for name, _ in model_tensors(Tied())]
    assert sorted(names) == ["embed.weight", "layers.0.weight", "layers.1.weight", "scale"]


def test_bytes_follow_the_model_in_the_wire_type() -> None:
    model = Tied()
    snapshot = Snapshot.of_model(model, "bfloat16")
    snapshot.capture()
    assert torch.equal(read(snapshot, "embed.weight"), model.embed.weight.detach().bfloat16())
    before = bytes(snapshot.view)
    with torch.no_grad():
        model.layers[1].weight.add_(1)
    assert bytes(snapshot.view) == before
    snapshot.capture()
    assert torch.equal(read(snapshot, "layers.1.weight"), model.layers[1].weight.detach().bfloat16())


def test_strides_empty_tensors_and_integers() -> None:
    tensors = {
        "a": torch.arange(12.0).view(3, 4).t(),
        "b": torch.empty(0, 3),
        "c": torch.arange(5),
        "d": torch.tensor(2.5),
    }
    snapshot = Snapshot(lambda: tensors.items(), "float16")
    snapshot.capture()
    assert torch.equal(read(snapshot, "a"), tensors["a"].half())
    assert torch.equal(read(snapshot, "c"), tensors["c"])
    assert read(snapshot, "d").item() == 2.5
    assert bytes(snapshot.view[24:64]) == bytes(40)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_parts_of_all_ranks_are_the_whole(count: int) -> None:
    tensors = {
        "a": torch.arange(130.0).view(10, 13).t(),
        "layers.0.none": torch.empty(0, 5),
        "layers.0.w": torch.arange(11, dtype=torch.int8).view(1, 11, 1),
        "layers.1.w": torch.arange(40.0).bfloat16().view(5, 8),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "z": torch.empty(3, 0),
    }
    whole = Snapshot(lambda: tensors.items())
    whole.capture()
    parts = [Snapshot(lambda: tensors.items(), index=index, count=count) for index in range(count)]
    for part in parts:
        part.capture()
    pieces = cut_spans({index: part.spans for index, part in enumerate(parts)}, whole.layout.nbytes, 7)
    flat = b"".join(bytes(parts[piece.sender].piece(piece.offset, piece.nbytes)) for piece in pieces)
    assert flat == bytes(whole.view)
    assert sum(len(part.view) for part in parts) <= len(whole.view) + 64 * count  # a rank's buffer holds its part only


def test_a_changed_model_is_refused() -> None:
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2)}
    snapshot = Snapshot(lambda: tensors.items())
    tensors["a"] = torch.zeros(3)
    with pytest.raises(UserError, match="tensor a"):
        snapshot.capture()
    del tensors["a"]
    with pytest.raises(UserError, match="tensor a is no longer"):
        snapshot.capture()
