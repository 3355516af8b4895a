"""What a version of the weights consists of: names, places in the flat copy, digests. Pure, without torch.

Right bytes under wrong names, shapes or types are wrong weights, and no chunk's digest would tell: therefore a manifest is sealed. Its
JSON carries a digest of all that it says, and without the right one it is not read.

A copy is one flat run of bytes. Tensors lie in wire order (grouped by layer, so that a layer-wise loader completes one layer at a
time), each at a 64-byte boundary, zeros between them. Chunks cut the same bytes into pieces of one size, regardless of tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpcrl.errors import DataError, UserError
from hpcrl.protocol.version import PolicyVersion
from hpcrl.weights.digest import chunk_digest, whole_digest

__all__ = ["ALIGNMENT", "DTYPE_BYTES", "Adapter", "Chunk", "Layout", "Manifest", "TensorEntry", "cut", "wire_order"]

ALIGNMENT = 64
"""Bytes; every tensor begins at a multiple."""

DTYPE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
"""Types that can travel, by their torch name, and bytes per element."""

_MAX_CHUNK = 1 << 30
"""Some MPI libraries fail beyond 2 GiB per message."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """``TensorEntry("model.norm.weight", "bfloat16", (128,), offset=64, nbytes=256)``; ``name`` is the Hugging Face name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of the flat copy, with its xxh3-128 in hex."""

    offset: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of all tensors in a flat copy of ``nbytes`` bytes."""

    tensors: tuple[TensorEntry, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, str, Sequence[int]]]) -> Layout:
        """Lay out ``(name, dtype, shape)`` in wire order. Raises UserError for a repeated name or a type that cannot travel."""
        described = {}
        for name, dtype, shape in tensors:
            if name in described:
                raise UserError(f"tensor {name} appears twice")
            if dtype not in DTYPE_BYTES:
                raise UserError(f"tensor {name} has type {dtype}; allowed: {', '.join(DTYPE_BYTES)}")
            described[name] = (dtype, tuple(int(size) for size in shape))
        entries, end = [], 0
        for name in wire_order(list(described)):
            dtype, dimensions = described[name]
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            nbytes = math.prod(dimensions) * DTYPE_BYTES[dtype]
            entries.append(TensorEntry(name, dtype, dimensions, offset, nbytes))
            end = offset + nbytes
        return cls(tuple(entries), end)


@dataclass(frozen=True, slots=True)
class Adapter:
    """What a version's tensors are when they are a LoRA adapter.

    ``config`` is PEFT's ``adapter_config.json``, ``base_digest`` that of the weight files of the model it was trained on
    (:func:`hpcrl.weights.digest.base_digest`).
    """

    config: dict[str, Any]
    base_digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version's description, as stored in ``manifests/L.S.json`` and sent to the replicas.

    ``digest`` is :func:`hpcrl.weights.digest.whole_digest` of the chunks; ``parent`` the version published before, or None;
    ``adapter`` is None for a version of full weights.
    """

    version: str
    parent: str | None
    lineage: int
    step: int
    digest: str
    nbytes: int
    tensors: tuple[TensorEntry, ...]
    chunks: tuple[Chunk, ...]
    tokenizer_digest: str
    model_config_digest: str
    adapter: Adapter | None = None

    @classmethod
    def build(
        cls,
        version: PolicyVersion,
        parent: str | None,
        layout: Layout,
        chunks: Sequence[Chunk],
        *,
        tokenizer_digest: str,
        model_config_digest: str,
        adapter: Adapter | None = None,
    ) -> Manifest:
        """Assemble a manifest; the whole's digest follows from the chunks'."""
        return cls(
            version=str(version),
            parent=parent,
            lineage=version.lineage,
            step=version.step,
            digest=whole_digest(chunk.digest for chunk in chunks),
            nbytes=layout.nbytes,
            tensors=layout.tensors,
            chunks=tuple(chunks),
            tokenizer_digest=tokenizer_digest,
            model_config_digest=model_config_digest,
            adapter=adapter,
        )

    def to_json(self) -> str:
        """Compact JSON with the keys of the fields."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    def to_dict(self) -> dict[str, Any]:
        """The manifest as plain values, and its ``seal``."""
        values = self._values()
        return values | {"seal": _seal(values)}

    def _values(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "parent": self.parent,
            "lineage": self.lineage,
            "step": self.step,
            "digest": self.digest,
            "nbytes": self.nbytes,
            "tensors": [
                {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "offset": t.offset, "nbytes": t.nbytes}
                for t in self.tensors
            ],
            "chunks": [{"offset": c.offset, "nbytes": c.nbytes, "digest": c.digest} for c in self.chunks],
            "tokenizer_digest": self.tokenizer_digest,
            "model_config_digest": self.model_config_digest,
            "adapter": None if self.adapter is None else asdict(self.adapter),
        }

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read a manifest. Raises DataError when it is not JSON or not consistent in itself."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise DataError("manifest", f"not JSON: {error}") from error
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Manifest:
        """Read plain values. Raises DataError for missing or unknown keys, wrong types, places that do not fit, another seal."""
        try:
            fields = dict(data)
            seal = fields.pop("seal")
            fields["tensors"] = tuple(TensorEntry(**{**t, "shape": tuple(t["shape"])}) for t in data["tensors"])
            fields["chunks"] = tuple(Chunk(**c) for c in data["chunks"])
            adapter = data.get("adapter")
            fields["adapter"] = None if adapter is None else Adapter(**adapter)
            manifest = cls(**fields)
            manifest._check()
            if seal != _seal(manifest._values()):
                raise ValueError("it was changed after it was written: its seal is another")
        except (KeyError, TypeError, ValueError, AttributeError, UserError) as error:
            raise DataError("manifest", f"malformed: {error}") from error
        return manifest

    def _check(self) -> None:
        if PolicyVersion.parse(self.version) != (self.lineage, self.step):
            raise ValueError(f"version {self.version} is not lineage {self.lineage} step {self.step}")
        end = 0
        for t in self.tensors:
            if t.dtype not in DTYPE_BYTES or t.nbytes != math.prod(t.shape) * DTYPE_BYTES[t.dtype]:
                raise ValueError(f"tensor {t.name}: {t.nbytes} bytes do not hold {t.dtype} {t.shape}")
            if t.offset < end or t.offset % ALIGNMENT:
                raise ValueError(f"tensor {t.name}: offset {t.offset} overlaps its predecessor or is not aligned")
            end = t.offset + t.nbytes
        if end != self.nbytes:
            raise ValueError(f"tensors end at {end}, the copy at {self.nbytes}")
        end = 0
        for c in self.chunks:
            if c.offset != end or c.nbytes <= 0:
                raise ValueError(f"chunk at {c.offset} does not continue at {end}")
            end += c.nbytes
        if end != self.nbytes:
            raise ValueError(f"chunks end at {end}, the copy at {self.nbytes}")
        if self.digest != whole_digest(c.digest for c in self.chunks):
            raise ValueError("the digest of the whole does not follow from the chunks'")


def _seal(values: dict[str, Any]) -> str:
    """xxh3-128 of a manifest's fields as JSON."""
    return chunk_digest(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def cut(nbytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """``(offset, nbytes)`` of the chunks of a flat copy; only the last may be shorter."""
    if not 0 < chunk_bytes <= _MAX_CHUNK:
        raise UserError(
            f"a chunk must have 1 … {_MAX_CHUNK} bytes, not {chunk_bytes} (weights.chunk_mib: at most 1024)"
        )
    return [(offset, min(chunk_bytes, nbytes - offset)) for offset in range(0, nbytes, chunk_bytes)]


def wire_order(names: Sequence[str]) -> list[str]:
    """Order parameter names by layer: the un-indexed block that comes first, layers ascending, everything else un-indexed.

    A layer is the outermost number in a name (``model.layers.3.mlp.experts.7.w1`` belongs to layer 3), so experts stay with their
    layer and no architecture has to be known. Stacks (``visual.blocks``, ``model.layers``) keep the order in which they appear.
    """
    keys = [_layer(name) for name in names]
    stacks = list(dict.fromkeys(key[0] for key in keys if key is not None))
    first = next((index for index, key in enumerate(keys) if key is not None), len(names))

    def rank(index: int) -> tuple[int, int, int]:
        key = keys[index]
        if key is not None:
            return (1 + stacks.index(key[0]), key[1], index)
        return (0 if index < first else 1 + len(stacks), 0, index)

    return [names[index] for index in sorted(range(len(names)), key=rank)]


def _layer(name: str) -> tuple[str, int] | None:
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[:index]), int(part)
    return None
