"""The watch and the comparison, on modules that load as vLLM's do: placeholders, fused and padded weights, packed kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from hpcrl.errors import DataError
from hpcrl.protocol.version import PolicyVersion
from hpcrl.weights.digest import chunk_digest
from hpcrl.weights.manifest import Chunk, Layout, Manifest, cut
from hpcrl.weights.vllm_engine import StagedWeights
from hpcrl.weights.vllm_held import Held, Watch, packed_kernels

NAMES = {"embed": (5, 20), "q": (4, 20), "k": (2, 20), "bias": (6,), "scale": ()}


class UnquantizedLinearMethod:
    """The name by which a layer says that its weight stays as it was loaded."""


class Packed(nn.Module):
    """A layer whose weight can be moved into a kernel, leaving an empty parameter."""

    def __init__(self, rows: int, keep: bool) -> None:
        super().__init__()
        self.quant_method = UnquantizedLinearMethod()
        self.rows, self.keep = rows, keep
        self.weight = nn.Parameter(torch.zeros(rows, 20), requires_grad=False)
        self.cpu_linear: Callable[..., torch.Tensor]

    def pack(self) -> None:
        copy = self.weight.detach().clone()
        self.cpu_linear = lambda x, weight, bias: nn.functional.linear(x, copy, bias)
        if not self.keep:
            self.weight = nn.Parameter(torch.empty(0), requires_grad=False)


class Model(nn.Module):
    """embed (padded by one row) is also the head's; q and k are fused; bias and scale are plain."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qk, self.head = Packed(6, True), Packed(6, False), Packed(6, True)
        self.head.weight = self.embed.weight
        self.plain = nn.Module()
        self.plain.bias = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.plain.scale = nn.Parameter(torch.zeros(()), requires_grad=False)
        for layer in (self.embed, self.qk, self.head):
            layer.pack()

    def load(self, staged: StagedWeights, *, skip: str = "", repair: bool = True) -> Watch:
        packed, held = packed_kernels(self), self.embed.weight
        self.embed.weight, self.qk.weight, self.head.weight = (
            nn.Parameter(torch.empty(6, 20, device="meta"), requires_grad=False) for _ in range(3)
        )
        watch = Watch(self, staged, packed)
        tensors = {name: tensor for name, tensor in staged if name != skip}
        with watch:
            for fresh in (False, True):  # as vLLM does: first onto the placeholders, then in earnest
                if fresh:
                    self.embed.weight, self.qk.weight = held, nn.Parameter(torch.zeros(6, 20), requires_grad=False)
                self._fill(tensors)
        self.head.weight = held
        for layer in (self.embed, self.qk, *([self.head] if repair else [])):
            layer.pack()
        return watch

    def _fill(self, tensors: dict[str, torch.Tensor]) -> None:
        self.embed.weight[:5].data.copy_(tensors["embed"])
        self.embed.weight[5:].data.fill_(0)
        self.qk.weight.data.narrow(0, 0, 4).copy_(tensors["q"])
        if "k" in tensors:
            self.qk.weight.data.narrow(0, 4, 2).copy_(tensors["k"])
        if "bias" in tensors:
            self.plain.bias.data.copy_(tensors["bias"])
        self.plain.scale.data.fill_(tensors["scale"].item())


@pytest.fixture
def staged(tmp_path: Path) -> StagedWeights:
    layout = Layout.of((name, "float32", shape) for name, shape in NAMES.items())
    data = torch.randn(layout.nbytes // 4, generator=torch.Generator().manual_seed(3)).numpy().tobytes()
    chunks = [Chunk(o, n, chunk_digest(data[o : o + n])) for o, n in cut(layout.nbytes, 64)]
    manifest = Manifest.build(PolicyVersion(0, 3), None, layout, chunks, tokenizer_digest="", model_config_digest="")
    path = tmp_path / "staging"
    path.write_bytes(data)
    return StagedWeights(manifest, path)


def check(model: Model, watch: Watch) -> Held:
    return watch.check(complete=True)


def test_a_good_load_is_compared_whole(staged: StagedWeights) -> None:
    model = Model()
    held = check(model, model.load(staged))
    # the head is embed's alias, with a packed copy of its own; q and k are in the packed kernel only; scale was computed
    assert held == Held(nbytes=4 * (100 + 6), packed=3, converted=["plain.scale"])


def test_a_changed_byte_is_found(staged: StagedWeights) -> None:
    model = Model()
    watch = model.load(staged)
    model.plain.bias.data[4] += 1e-6
    with pytest.raises(DataError, match=r"held_weights: after loading version 0\.3 plain\.bias differs"):
        check(model, watch)


def test_a_stale_packed_head_is_found(staged: StagedWeights) -> None:
    model = Model()
    with pytest.raises(DataError, match=r"packed copy of head\.weight is that of an earlier version"):
        check(model, model.load(staged, repair=False))


def test_a_wrongly_packed_weight_is_found(staged: StagedWeights) -> None:
    model = Model()
    watch = model.load(staged)
    whole = torch.randn(6, 20)
    model.qk.cpu_linear = lambda x, weight, bias: nn.functional.linear(x, whole, bias)
    with pytest.raises(DataError, match=r"packed copy of qk\.weight differs"):
        check(model, watch)


def test_a_missing_part_of_a_fused_weight_is_found(staged: StagedWeights) -> None:
    model = Model()
    with pytest.raises(DataError, match=r"qk\.weight was given 80 of 120 values"):
        check(model, model.load(staged, skip="k"))


def test_a_parameter_without_a_value_is_found(staged: StagedWeights) -> None:
    model = Model()
    with pytest.raises(DataError, match=r"plain\.bias was given no value"):
        check(model, model.load(staged, skip="bias"))


def test_a_head_that_lost_its_tie_is_found(staged: StagedWeights) -> None:
    model = Model()
    watch = model.load(staged)
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    with pytest.raises(DataError, match=r"head\.weight was given no value"):
        check(model, watch)


def test_a_computed_parameter_is_not_compared(staged: StagedWeights) -> None:
    model = Model()
    watch = model.load(staged)
    with watch:
        model.plain.bias.data.copy_(-model.plain.bias.exp())
    assert check(model, watch).converted == ["plain.bias", "plain.scale"]
