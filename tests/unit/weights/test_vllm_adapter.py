"""What vLLM's layers hold for an adapter, on layers that are stacked, fused and cut as vLLM's are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcrl.errors import DataError
from hpcrl.weights.vllm_adapter import check_layers

SLOTS, MAX_RANK, RANK, INPUTS = 3, 4, 2, 6
ROWS = {"q": 8, "k": 4, "v": 4, "o": 6}


class Layer:
    """Column-parallel on two ranks, of which this is the second; fused when it has several parts."""

    tp_size = 2

    def __init__(self, *rows: int) -> None:
        self.n_slices = len(rows)
        self.rows = rows
        self.lora_a_stacked = tuple(torch.zeros(SLOTS, 1, MAX_RANK, INPUTS) for _ in rows)
        self.lora_b_stacked = tuple(torch.zeros(SLOTS, 1, count // 2, MAX_RANK) for count in rows)

    def slice_lora_a(self, a: Any) -> Any:
        return a

    def slice_lora_b(self, b: Any) -> Any:
        if isinstance(b, list):
            return [None if part is None else part[len(part) // 2 :] for part in b]
        return b[len(b) // 2 :]

    def load(self, slot: int, *pairs: dict[str, torch.Tensor] | None) -> None:
        for index, pair in enumerate(pairs):
            self.lora_a_stacked[index][slot] = 0
            self.lora_b_stacked[index][slot] = 0
            if pair is not None:
                self.lora_a_stacked[index][slot, 0, :RANK] = pair["A"]
                self.lora_b_stacked[index][slot, 0, :, :RANK] = pair["B"][self.rows[index] // 2 :]


PACKED = {"attn.qkv": ["attn.q", "attn.k", "attn.v"]}


def loaded(*names: str) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    """Layers that hold a random adapter of the named modules in slot 1, and that adapter."""
    torch.manual_seed(1)
    pairs = {f"attn.{name}": {"A": torch.randn(RANK, INPUTS), "B": torch.randn(ROWS[name], RANK)} for name in names}
    layers = {"attn.qkv": Layer(ROWS["q"], ROWS["k"], ROWS["v"]), "attn.o": Layer(ROWS["o"])}
    layers["attn.qkv"].load(1, *(pairs.get(f"attn.{name}") for name in "qkv"))
    layers["attn.o"].load(1, pairs.get("attn.o"))
    return layers, pairs


@pytest.mark.parametrize("names", ["qkvo", "qv", "o"])
def test_what_was_loaded_is_found(names: str) -> None:
    layers, pairs = loaded(*names)
    compared = sum(4 * (RANK * INPUTS + ROWS[name] // 2 * RANK) for name in names)
    assert check_layers(layers, PACKED, 1, pairs) == compared
    layers["attn.qkv"].lora_a_stacked[0][2] = 7.0  # another adapter's slot
    assert check_layers(layers, PACKED, 1, pairs) == compared


@pytest.mark.parametrize(("layer", "stack", "place"), [("attn.o", 0, (0, 0)), ("attn.qkv", 2, (3, 5))])
def test_a_value_that_differs_or_was_left_behind(layer: str, stack: int, place: tuple[int, int]) -> None:
    layers, pairs = loaded("q", "k", "o")  # nothing of v, and only RANK of MAX_RANK rows
    layers[layer].lora_a_stacked[stack][(1, 0, *place)] += 1e-6
    with pytest.raises(DataError, match=rf"held_adapter: {layer} differs from the published adapter"):
        check_layers(layers, PACKED, 1, pairs)


def test_an_unscaled_factor_a_part_in_anothers_place_and_a_module_that_no_layer_has() -> None:
    layers, pairs = loaded("q", "k", "v", "o")
    double = pairs | {"attn.o": {"A": pairs["attn.o"]["A"], "B": pairs["attn.o"]["B"] * 2}}
    with pytest.raises(DataError, match=r"attn\.o differs"):
        check_layers(layers, PACKED, 1, double)
    swapped = pairs | {"attn.k": pairs["attn.v"], "attn.v": pairs["attn.k"]}
    with pytest.raises(DataError, match=r"attn\.qkv differs"):
        check_layers(layers, PACKED, 1, swapped)
    with pytest.raises(DataError, match=r"no linear layer has taken attn\.gate"):
        check_layers(layers, PACKED, 1, pairs | {"attn.gate": pairs["attn.o"]})
    layers["attn.o"].n_slices = 2
    with pytest.raises(DataError, match=r"attn\.o cannot be compared"):
        check_layers(layers, PACKED, 1, pairs)
