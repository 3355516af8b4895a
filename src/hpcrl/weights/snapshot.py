"""The trainer's side of a copy: this rank's part of the model → one compact, reusable host buffer. Copies, and does nothing else.

    DDP      all ranks hold all tensors; each copies the rows that lie in its share of the flat copy
    FSDP2    each rank holds rows of every tensor (DTensors, Shard(0)); each copies its own rows, and nothing is gathered

The buffer holds the own spans of the flat copy in order, the zeros between tensors included. Beside it a capture needs no memory on
CPUs; on a GPU at most one tensor's rows, where the wire type differs.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from hpcrl.errors import UserError
from hpcrl.weights.manifest import ALIGNMENT, Layout, TensorEntry

__all__ = ["Snapshot", "model_tensors"]

TensorSource = Callable[[], Iterable[tuple[str, torch.Tensor]]]


def model_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers of an unwrapped module by Hugging Face name; a tied tensor once, under its first name."""
    seen: set[int] = set()
    found = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            found.append((name, tensor))
    return found


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows ``first … last`` (exclusive) of a tensor that this rank sends; ``sharded``: the rank holds only these."""

    first: int
    last: int
    sharded: bool


class Snapshot:
    """Part ``index`` of ``count`` of the tensors that ``source()`` yields as (name, tensor).

    Names and shapes must be the same each time; strides and devices are free. ``wire_dtype`` ("bfloat16") is the type in which
    floating-point tensors travel, None: each its own. Other tensors keep theirs. Raises UserError for a type or a sharding that
    cannot travel.
    """

    def __init__(
        self,
        source: TensorSource,
        wire_dtype: str | None = None,
        pin_memory: bool = False,
        *,
        index: int = 0,
        count: int = 1,
    ) -> None:
        self._source = source
        self._wire_dtype = wire_dtype
        tensors = dict(source())
        self.layout = Layout.of((name, self._dtype_of(t), tuple(t.shape)) for name, t in tensors.items())
        parts = []
        for place, entry in enumerate(self.layout.tensors):
            rows = _held_rows(entry, tensors[entry.name]) or _share_of(entry, self.layout.nbytes, index, count)
            parts.append((entry, rows, _bytes_of(self.layout, place, rows)))
        self.spans = _merged([held for _, _, held in parts])
        """(offset, nbytes) of what this rank sends, in order."""
        self._places = _placed(self.spans)
        size = self._places[-1] + self.spans[-1][1] if self.spans else 0
        self._buffer = torch.zeros(size, dtype=torch.uint8, pin_memory=pin_memory and size > 0)
        self._targets = {entry.name: (entry, rows, self._target(entry, rows)) for entry, rows, _ in parts}

    @classmethod
    def of_model(cls, model: nn.Module, wire_dtype: str | None = None, *, index: int = 0, count: int = 1) -> Snapshot:
        """Part ``index`` of an unwrapped (DDP) or fully sharded (FSDP2) Hugging Face module; pinned when it is on a GPU."""
        on_gpu = any(parameter.is_cuda for parameter in model.parameters())
        return cls(lambda: model_tensors(model), wire_dtype, on_gpu, index=index, count=count)

    @property
    def view(self) -> memoryview:
        """The buffer; of an only part the whole flat copy, ``layout.nbytes`` bytes."""
        return self._buffer.numpy().data

    def piece(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of the flat copy that lie inside one own span."""
        start = self._local(offset)
        return self.view[start : start + nbytes]

    @torch.no_grad()
    def capture(self) -> None:
        """Copy the own rows. Raises UserError when names or shapes have changed."""
        missing = set(self._targets)
        on_gpu = False
        for name, tensor in self._source():
            missing.discard(name)
            if name not in self._targets or tuple(tensor.shape) != self._targets[name][0].shape:
                raise UserError(f"tensor {name} {tuple(tensor.shape)} was not there when the snapshot was laid out")
            _, rows, target = self._targets[name]
            if target is None:
                continue
            held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if not rows.sharded and held.dim():
                held = held[rows.first : rows.last]
            target.copy_(held.detach(), non_blocking=held.is_cuda)
            on_gpu |= held.is_cuda
        if missing:
            raise UserError(f"tensor {min(missing)} is no longer in the model")
        if on_gpu:
            torch.cuda.synchronize()

    def _dtype_of(self, tensor: torch.Tensor) -> str:
        if self._wire_dtype is not None and tensor.is_floating_point():
            return self._wire_dtype
        return str(tensor.dtype).removeprefix("torch.")

    def _target(self, entry: TensorEntry, rows: _Rows) -> torch.Tensor | None:
        """Where the rows of a tensor go; None when there are none."""
        size = (rows.last - rows.first) * _row_bytes(entry)
        if not size:
            return None
        start = self._local(entry.offset + rows.first * _row_bytes(entry))
        shape = (rows.last - rows.first, *entry.shape[1:]) if entry.shape else ()
        return self._buffer[start : start + size].view(getattr(torch, entry.dtype)).view(shape)

    def _local(self, offset: int) -> int:
        """Where a byte of the flat copy lies in the buffer."""
        number = bisect.bisect_right(self.spans, offset, key=lambda span: span[0]) - 1
        return self._places[number] + offset - self.spans[number][0]


def _rows(entry: TensorEntry) -> int:
    return entry.shape[0] if entry.shape else 1


def _row_bytes(entry: TensorEntry) -> int:
    return entry.nbytes // _rows(entry) if entry.nbytes else 0


def _held_rows(entry: TensorEntry, tensor: torch.Tensor) -> _Rows | None:
    """The rows that this rank holds of a sharded tensor; None for one that every rank holds whole.

    With replicas of the sharded model (HSDP) the first one sends.
    """
    if not isinstance(tensor, DTensor) or all(isinstance(p, Replicate) for p in tensor.placements):
        return None
    shards = [(axis, p) for axis, p in enumerate(tensor.placements) if not isinstance(p, Replicate)]
    axis, placement = shards[0]
    if len(shards) > 1 or not isinstance(placement, Shard) or placement.dim != 0:
        raise UserError(
            f"tensor {entry.name} is placed as {tensor.placements}; weights can be published from tensors sharded along "
            "dimension 0 over one mesh dimension (FSDP2's default), replicated over the others"
        )
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None or any(place[other] for other in range(mesh.ndim) if other != axis):
        return _Rows(0, 0, sharded=True)
    # As torch.chunk cuts: equal shards of ⌈rows/ranks⌉, the last ones shorter or empty.
    size = -(-entry.shape[0] // mesh.size(axis))
    first = min(place[axis] * size, entry.shape[0])
    return _Rows(first, min(first + size, entry.shape[0]), sharded=True)


def _share_of(entry: TensorEntry, nbytes: int, index: int, count: int) -> _Rows:
    """The rows that begin in part ``index`` of ``count`` equal parts of the flat copy."""
    width = _row_bytes(entry)
    if not width:
        return _Rows(0, 0, sharded=False)
    ends = (nbytes * index // count, nbytes * (index + 1) // count)
    first, last = (min(max(-(-(end - entry.offset) // width), 0), _rows(entry)) for end in ends)
    return _Rows(first, last, sharded=False)


def _bytes_of(layout: Layout, place: int, rows: _Rows) -> tuple[int, int]:
    """(offset, nbytes) of some rows; the zeros after a tensor belong to its last row."""
    entry = layout.tensors[place]
    if rows.first == rows.last:
        return entry.offset, 0
    width = _row_bytes(entry)
    end = entry.offset + rows.last * width
    if rows.last == _rows(entry):
        end = layout.tensors[place + 1].offset if place + 1 < len(layout.tensors) else layout.nbytes
    return entry.offset + rows.first * width, end - (entry.offset + rows.first * width)


def _merged(held: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges that continue each other."""
    spans: list[tuple[int, int]] = []
    for offset, nbytes in held:
        if not nbytes:
            continue
        if spans and spans[-1][0] + spans[-1][1] == offset:
            spans[-1] = (spans[-1][0], spans[-1][1] + nbytes)
        else:
            spans.append((offset, nbytes))
    return spans


def _placed(spans: list[tuple[int, int]]) -> list[int]:
    """Where each span begins in the buffer: as far from an aligned address as in the flat copy, so that every type can be viewed."""
    places, end = [], 0
    for offset, nbytes in spans:
        places.append(-(-end // ALIGNMENT) * ALIGNMENT + offset % ALIGNMENT)
        end = places[-1] + nbytes
    return places
