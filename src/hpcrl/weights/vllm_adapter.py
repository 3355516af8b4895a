"""What vLLM's layers HOLD after an adapter was loaded, compared bit by bit with the published tensors. Runs in vLLM's workers.

    replica                      vLLM API server                       worker
    -------                      ---------------                       ------
    /v1/load_lora_adapter  ─▶    name L.S → adapter id, add_lora  ─▶   load the directory, copy it into a free slot of each layer
    /collective_rpc        ─▶                                          hpcrl_check_adapter: the id that is new, its slot, each matrix
    /v1/unload_lora_adapter ─▶   the name is unknown from here on
    /collective_rpc        ─▶                                          hpcrl_drop_adapter: the slot is free

vLLM would silently leave out a matrix whose name it does not know, scale by another factor, or serve the base model where nothing
was loaded; so the slot must hold ``A`` and ``B · alpha / rank`` where the adapter has a module, and zeros everywhere else.
The tensors compared with are read from the very files that vLLM read, after their digests were compared with the manifest's.

Unloading alone keeps the adapter in the worker until vLLM's cache evicts the one that was used least recently, which may be one
that is still needed: therefore it is dropped by us.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hpcrl.errors import DataError, HpcrlError
from hpcrl.weights.adapter import adapter_of, read_adapter
from hpcrl.weights.manifest import Manifest

__all__ = ["AdapterWorker", "check_layers"]

_DIFFERS = "held_adapter"
"""Reason of an adapter that was loaded but is not what the model holds."""

Pair = dict[str, torch.Tensor]
"""``A`` (rank, inputs) and ``B`` (outputs, rank) of one module."""


class AdapterWorker:
    """Mixed into vLLM's worker (``--worker-extension-cls``); its methods are called by name and answer with plain values."""

    model_runner: Any

    def hpcrl_check_adapter(self, manifest: str, directory: str) -> dict[str, Any]:
        """Compare the adapter that was loaded since the last call. ``error`` is empty when it is what the manifest file says.

        With an error it is no longer loaded.
        """
        lora = self.model_runner.lora_manager
        known = self._known()
        new = sorted(lora.list_adapters() - set(known.values()))
        try:
            described = Manifest.from_json(Path(manifest).read_text(encoding="utf-8"))
            if len(new) != 1:
                raise DataError(
                    _DIFFERS, f"version {described.version} was loaded, but the worker has {len(new)} new adapters"
                )
            nbytes = _check(lora._adapter_manager, new[0], described, Path(directory))
        except (OSError, HpcrlError) as error:
            for adapter_id in new:
                lora.remove_adapter(adapter_id)
            return {"error": str(error), "nbytes": 0}
        known[described.version] = new[0]
        return {"error": "", "nbytes": nbytes}

    def hpcrl_drop_adapter(self, version: str) -> dict[str, Any]:
        """Free the slot of a version; ``error`` is empty when it was there."""
        adapter_id = self._known().pop(version, None)
        dropped = adapter_id is not None and self.model_runner.lora_manager.remove_adapter(adapter_id)
        return {"error": "" if dropped else f"the worker holds no adapter {version}"}

    def _known(self) -> dict[str, int]:
        """vLLM's adapter ids by version. Kept in the instance: a base class that vLLM mixes in is never initialised."""
        known: dict[str, int] = vars(self).setdefault("_hpcrl_adapters", {})
        return known


def _check(manager: Any, adapter_id: int, manifest: Manifest, directory: Path) -> int:
    """Compare one adapter's slot in every linear layer; returns the bytes compared. Raises DataError."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.utils import parse_fine_tuned_lora_name

    config = adapter_of(manifest).config
    if adapter_id not in manager.lora_index_to_id:
        raise DataError(_DIFFERS, f"version {manifest.version} was loaded but has no slot")
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    mapper = None if mapper is None else mapper.get_rename_mapper()
    pairs: dict[str, Pair] = {}
    for name, tensor in read_adapter(manifest, directory).items():
        module, is_a = parse_fine_tuned_lora_name(name, mapper)
        if not is_a:
            tensor = tensor * (config["lora_alpha"] / config["r"])
        pairs.setdefault(module, {})["A" if is_a else "B"] = tensor
    linear = {name: module for name, module in manager.modules.items() if isinstance(module, BaseLinearLayerWithLoRA)}
    try:
        return check_layers(linear, manager.packed_modules, manager.lora_index_to_id.index(adapter_id), pairs)
    except DataError as error:
        raise DataError(_DIFFERS, f"after loading adapter {manifest.version} {error}") from error


def check_layers(modules: dict[str, Any], packed: dict[str, list[str]], slot: int, pairs: dict[str, Pair]) -> int:
    """Compare slot ``slot`` of vLLM's adaptable layers with ``pairs`` (by the names that the adapter uses, ``B`` scaled).

    ``packed``: a fused module → its parts in order (``qkv_proj`` → q, k, v). Returns the bytes compared. Raises DataError naming the
    first module that differs, and a pair that no module took.
    """
    left = dict(pairs)
    nbytes = 0
    for name, module in modules.items():
        parts = [left.pop(part, None) for part in packed.get(name, [name])]
        if name not in packed and module.n_slices != 1:
            raise DataError(_DIFFERS, f"{name} cannot be compared: it is cut into {module.n_slices} by vLLM itself")
        for stack, expected in _slot_contents(module, parts, fused=name in packed):
            held = stack[slot, 0]
            wanted = torch.zeros_like(held, device="cpu")
            if expected is not None:
                wanted[: expected.shape[0], : expected.shape[1]] = expected
                nbytes += expected.nbytes
            if not torch.equal(held.cpu(), wanted):
                raise DataError(_DIFFERS, f"{name} differs from the published adapter")
    if left:
        raise DataError(_DIFFERS, f"no linear layer has taken {min(left)}")
    return nbytes


def _slot_contents(
    module: Any, parts: list[Pair | None], *, fused: bool
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Each stacked buffer of a layer with the block that this rank must hold in a slot; cut by the layer's own tensor-parallel rule."""
    if not any(parts):
        return [(stack, None) for stack in (*module.lora_a_stacked, *module.lora_b_stacked)]
    a: Any = [None if part is None else part["A"] for part in parts]
    b: Any = [None if part is None else part["B"] for part in parts]
    if fused and len(b) != module.n_slices:
        a, b = module.expand_packed_lora(a, b)
    if not fused:
        a, b = a[0], b[0]
    if module.tp_size > 1:
        a, b = module.slice_lora_a(a), module.slice_lora_b(b)
    if not fused:
        a, b = [a], [b]
    return [*zip(module.lora_a_stacked, a, strict=True), *zip(module.lora_b_stacked, b, strict=True)]
