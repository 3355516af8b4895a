"""LoRA adapters in PEFT's format: names, configuration, and the directory that vLLM (or anybody's ``peft``) loads. Without torch.

    trainer   lora_A, lora_B of each adapted layer ──▶ a flat copy like any other version; Manifest.adapter says what it is
    replica   staging file ──▶ write_adapter ──▶ L.S/adapter_model.safetensors and adapter_config.json
    vLLM      loads that directory; read_adapter reads it again and holds it against the manifest (vllm_adapter.py)

Formats: https://huggingface.co/docs/peft/developer_guides/checkpoint and https://github.com/huggingface/safetensors#format (length of
the header, header, bytes without holes).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpcrl.errors import DataError
from hpcrl.weights.digest import chunk_digest, whole_digest
from hpcrl.weights.manifest import Adapter, Manifest

if TYPE_CHECKING:
    import torch

__all__ = ["adapter_of", "peft_config", "peft_name", "read_adapter", "write_adapter"]

_CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"
_SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Types in which an adapter travels, as that format calls them."""
_DIFFERS = "adapter_files"
"""Reason of an adapter whose files are not what its manifest says."""


def peft_name(module: str, matrix: Literal["A", "B"]) -> str:
    """The name of one matrix of an adapted module: ``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight``."""
    return f"base_model.model.{module}.lora_{matrix}.weight"


def peft_config(base: str, rank: int, alpha: float, target_modules: Sequence[str]) -> dict[str, Any]:
    """Content of ``adapter_config.json``: plain LoRA, scaled by ``alpha / rank``, on the model in directory ``base``."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def adapter_of(manifest: Manifest) -> Adapter:
    """What makes the version an adapter. Raises DataError when it is one of full weights."""
    if manifest.adapter is None:
        raise DataError(_DIFFERS, f"version {manifest.version} is not an adapter")
    return manifest.adapter


def write_adapter(manifest: Manifest, flat: memoryview, directory: Path) -> None:
    """Make ``directory`` out of the flat copy of a version. Raises DataError for one of full weights, OSError."""
    adapter = adapter_of(manifest)
    directory.mkdir(parents=True)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in manifest.tensors:
        header[entry.name] = {
            "dtype": _SAFETENSORS[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [end, end + entry.nbytes],
        }
        end += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(directory / _TENSORS, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in manifest.tensors:
            file.write(flat[entry.offset : entry.offset + entry.nbytes])
    (directory / _CONFIG).write_text(json.dumps(adapter.config, indent=2), encoding="utf-8")


def read_adapter(manifest: Manifest, directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of an adapter directory, by name.

    The flat copy is put together again from what the files hold, and its digests are compared with the manifest's. Raises
    DataError(``adapter_files``) when anything differs.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    adapter = adapter_of(manifest)
    try:
        config = json.loads((directory / _CONFIG).read_text(encoding="utf-8"))
        tensors: dict[str, torch.Tensor] = load_file(directory / _TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(_DIFFERS, f"version {manifest.version}: cannot read {directory}: {error}") from error
    if config != adapter.config:
        raise DataError(_DIFFERS, f"version {manifest.version}: {directory / _CONFIG} differs from the manifest")
    flat = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    for entry in manifest.tensors:
        found = tensors.get(entry.name)
        if found is None or (str(found.dtype), tuple(found.shape)) != (f"torch.{entry.dtype}", entry.shape):
            raise DataError(
                _DIFFERS, f"version {manifest.version}: {entry.name} is not in {directory}, or another type"
            )
        flat[entry.offset : entry.offset + entry.nbytes] = found.reshape(-1).view(torch.uint8)
    view = flat.numpy().data
    digests = [chunk_digest(view[chunk.offset : chunk.offset + chunk.nbytes]) for chunk in manifest.chunks]
    if len(tensors) != len(manifest.tensors) or whole_digest(digests) != manifest.digest:
        raise DataError(_DIFFERS, f"version {manifest.version}: the tensors in {directory} differ from the manifest")
    return tensors
