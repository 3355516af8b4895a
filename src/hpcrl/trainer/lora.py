"""LoRA: a low-rank adapter on chosen linear layers of a frozen model (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

    y = W x + (alpha / rank) · B (A x)        A (rank, inputs) starts random, B (outputs, rank) at zero: version 0.0 is the base model

An adapted layer takes the place of its ``nn.Linear`` and keeps that layer's own parameters, so every name of the model stays what it
is and only ``lora_A`` and ``lora_B`` are new. Those two are float32 whatever the model's type is, and are rounded to the model's type
where they are used: small updates are not lost, and what is computed with is exactly what is published and served.

The ``peft`` library is not used: it computes an adapter either in float32, which is not what is served, or keeps it in the model's
type, where small updates are lost; it renames the model's parameters; and what is needed of it is this file. The format of what leaves
(names, configuration, directory) is PEFT's: weights/adapter.py.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hpcrl.config.sections import LoraSection
from hpcrl.errors import UserError
from hpcrl.weights.adapter import peft_config, peft_name

__all__ = ["LoraLinear", "adapter_tensors", "add_adapters", "export_adapter", "merged_state"]


class LoraLinear(nn.Linear):
    """An ``nn.Linear`` with an adapter; takes over the given layer's parameters.

    ``lora_A`` is drawn as PEFT does (Kaiming uniform, a = √5) from ``generator``.
    """

    def __init__(self, layer: nn.Linear, rank: int, scaling: float, generator: torch.Generator) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.scaling = scaling
        a = torch.empty(rank, layer.in_features)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        self.lora_A = nn.Parameter(a.to(layer.weight.device))
        self.lora_B = nn.Parameter(torch.zeros(layer.out_features, rank, device=layer.weight.device))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        a, b = self.lora_A.to(input.dtype), self.lora_B.to(input.dtype)
        return super().forward(input) + functional.linear(functional.linear(input, a), b) * self.scaling

    @torch.no_grad()
    def merged_weight(self) -> torch.Tensor:
        """The weight of a plain layer that computes the same, in the weight's type."""
        a, b = (matrix.to(self.weight.dtype).float() for matrix in (self.lora_A, self.lora_B))
        return (self.weight.float() + (b @ a) * self.scaling).to(self.weight.dtype)


def add_adapters(model: Any, section: LoraSection, seed: int) -> None:
    """Freeze ``model`` and put an adapter on each target; equal on all ranks with the same seed.

    Raises UserError naming a target that no linear layer has, and what there is.
    """
    head = model.get_output_embeddings()
    linear = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head
    }
    there = sorted({name.rpartition(".")[2] for name in linear})
    unknown = [target for target in section.target_modules if target not in there]
    if unknown:
        raise UserError(
            f"lora.target_modules: {type(model).__name__} has no linear layer {', '.join(unknown)}; it has {', '.join(there)}"
        )
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, layer in linear.items():
        parent, _, last = name.rpartition(".")
        if last in section.target_modules:
            adapted = LoraLinear(layer, section.rank, section.alpha / section.rank, generator)
            setattr(model.get_submodule(parent), last, adapted.train(layer.training))


def _adapted(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    return ((name, layer) for name, layer in model.named_modules() if isinstance(layer, LoraLinear))


def adapter_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The adapter's parameters by PEFT's names: what is published."""
    found: list[tuple[str, torch.Tensor]] = []
    for name, layer in _adapted(model):
        found += [(peft_name(name, "A"), layer.lora_A), (peft_name(name, "B"), layer.lora_B)]
    return found


def merged_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state of a plain model that computes the same: the adapters are added to the weights they belong to."""
    state: dict[str, torch.Tensor] = model.state_dict()
    for name, layer in _adapted(model):
        del state[f"{name}.lora_A"], state[f"{name}.lora_B"]
        state[f"{name}.weight"] = layer.merged_weight()
    return state


def export_adapter(model: nn.Module, section: LoraSection, base: str, dtype: str, target: Path) -> None:
    """Write the adapter in ``dtype`` as a PEFT directory at ``target`` (beside, then renamed)."""
    from safetensors.torch import save_file

    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tensors = {
        name: tensor.detach().to("cpu", getattr(torch, dtype)).contiguous() for name, tensor in adapter_tensors(model)
    }
    save_file(tensors, temporary / "adapter_model.safetensors", {"format": "pt"})
    config = peft_config(base, section.rank, section.alpha, section.target_modules)
    (temporary / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    temporary.rename(target)
