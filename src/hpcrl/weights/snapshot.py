"""The trainer's side of a copy: model tensors → one flat, reusable host buffer in wire order. Copies, and does nothing else.

Under DDP every rank holds all tensors, and copies only those that lie in the byte range it owns; the rest of its buffer is never
touched and costs no memory. Bytes between tensors stay zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from hpcrl.errors import UserError
from hpcrl.weights.manifest import Layout, TensorEntry

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


class Snapshot:
    """``source()`` yields (name, tensor), the same names and shapes each time; strides and devices are free.

    ``wire_dtype`` ("bfloat16") is the type in which floating-point tensors travel, None: each its own. Other tensors keep theirs.
    Raises UserError for a type that cannot travel.
    """

    def __init__(self, source: TensorSource, wire_dtype: str | None = None, pin_memory: bool = False) -> None:
        self._source = source
        self._wire_dtype = wire_dtype
        described = [(name, self._dtype_of(tensor), tuple(tensor.shape)) for name, tensor in source()]
        self.layout = Layout.of(described)
        self._buffer = torch.zeros(self.layout.nbytes, dtype=torch.uint8, pin_memory=pin_memory)
        self._targets = {entry.name: (entry, self._target(entry)) for entry in self.layout.tensors}

    @classmethod
    def of_model(cls, model: nn.Module, wire_dtype: str | None = None) -> Snapshot:
        """Snapshot of an unwrapped Hugging Face module; the host buffer is pinned when the model is on a GPU."""
        on_gpu = any(parameter.is_cuda for parameter in model.parameters())
        return cls(lambda: model_tensors(model), wire_dtype, pin_memory=on_gpu)

    @property
    def view(self) -> memoryview:
        """The flat copy, ``layout.nbytes`` bytes."""
        return self._buffer.numpy().data

    @torch.no_grad()
    def capture(self, start: int = 0, end: int | None = None) -> None:
        """Copy all tensors that have bytes in ``start <= offset < end``. Raises UserError when names or shapes have changed."""
        end = self.layout.nbytes if end is None else end
        missing = set(self._targets)
        on_gpu = False
        for name, tensor in self._source():
            missing.discard(name)
            if name not in self._targets or tuple(tensor.shape) != self._targets[name][0].shape:
                raise UserError(f"tensor {name} {tuple(tensor.shape)} was not there when the snapshot was laid out")
            entry, target = self._targets[name]
            if entry.nbytes and entry.offset < end and entry.offset + entry.nbytes > start:
                target.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
                on_gpu |= tensor.is_cuda
        if missing:
            raise UserError(f"tensor {min(missing)} is no longer in the model")
        if on_gpu:
            torch.cuda.synchronize()

    def _dtype_of(self, tensor: torch.Tensor) -> str:
        if self._wire_dtype is not None and tensor.is_floating_point():
            return self._wire_dtype
        return str(tensor.dtype).removeprefix("torch.")

    def _target(self, entry: TensorEntry) -> torch.Tensor:
        dtype = getattr(torch, entry.dtype)
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        return self._buffer[entry.offset : entry.offset + entry.nbytes].view(dtype).view(entry.shape)
