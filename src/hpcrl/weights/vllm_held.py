"""What the model HOLDS after a reload, compared byte by byte with the staged copy. Runs in vLLM's workers.

Where a tensor goes is the loaders' business (fused q/k/v, tensor-parallel slices, padded vocabularies), so their copies are watched,
not guessed:

    reload   Watch: each copy of staged bytes into a parameter ─▶ Piece (module, parameter, place in it, staged bytes)
    after    Watch.check looks at each parameter as it is then:
               readable parameter          the bytes at every piece's place
               alias (a tied output head)  the same storage, so the same bytes; its packed copy is looked at on its own
               packed by a CPU kernel      made during this reload, and unit vectors give back columns of the weight
               converted (quantised, MoE)  bytes of another layout: counted, not compared

vLLM's own checksum (``/weight_checker``) does not do: it is keyed by fused names, so no manifest has its values, and it reads
parameters only, while vLLM's CPU kernels keep the weights in packed copies and leave empty parameters behind. Just there an update
can fail silently: a tied head goes on with its old packed copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpcrl.errors import DataError
from hpcrl.weights.vllm_engine import StagedWeights

__all__ = ["Held", "Watch", "packed_kernels"]

_DIFFERS = "held_weights"
"""Reason of a version that was loaded but is not what the model holds."""

_PLAIN = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
"""vLLM's quantisation methods that leave a weight's layout as the loaders filled it."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SLAB_BYTES = 64 << 20
_COLUMNS = 16
"""Neighbouring columns read back from each packed weight; others at each version."""

Kernel = Callable[..., torch.Tensor]
Place = tuple[tuple[int, ...], tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class Piece:
    """Staged bytes and where in a parameter's storage they were put (size, stride, offset in elements)."""

    source: torch.Tensor
    place: Place

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        size, stride, offset = self.place
        return parameter.as_strided(size, stride, parameter.storage_offset() + offset)


@dataclass(slots=True)
class _Target:
    """One parameter during the reload: its layout as the loaders see it, and what they put there."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    start: int
    pieces: dict[Place, Piece] = field(default_factory=dict)
    padding: dict[Place, int] = field(default_factory=dict)
    computed: bool = False
    compared: int | None = None

    @property
    def values(self) -> int:
        """Elements that were given a value."""
        return sum(piece.source.numel() for piece in self.pieces.values()) + sum(self.padding.values())


@dataclass(slots=True)
class Held:
    """What a check covered: bytes compared, packed weights probed, parameters that could not be compared (their names)."""

    nbytes: int = 0
    packed: int = 0
    converted: list[str] = field(default_factory=list)


class Watch(TorchDispatchMode):
    """Notes what the loaders do while it is entered. Create it when the reload has put its placeholders into the model.

    ``packed_before``: what :func:`packed_kernels` returned before the reload.
    """

    def __init__(
        self, model: torch.nn.Module, staged: StagedWeights, packed_before: dict[torch.nn.Module, Kernel]
    ) -> None:
        super().__init__()
        self._model = model
        self._staged = staged
        self._packed_before = packed_before
        self._targets: dict[tuple[torch.nn.Module, str], _Target] = {}
        self._by_storage: dict[int, _Target] = {}
        self._alive = []  # a freed storage's address could be given to another
        for module, name, tensor in _tensors(model):
            target = _Target(tensor.shape, tensor.stride(), tensor.dtype, int(tensor.storage_offset()))
            self._targets[module, name] = self._by_storage.setdefault(_storage(tensor), target)
            self._alive.append(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._copied(args[0], args[1])
        elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor):
            self._filled(args[0])
        return result

    def _filled(self, into: torch.Tensor) -> None:
        target = self._by_storage.get(_storage(into))
        if target is None:
            return
        if target.shape.numel() == 1:  # a scalar is loaded by its value
            target.computed = True
        target.padding[_place(into, target)] = into.numel()

    def _copied(self, into: torch.Tensor, source: torch.Tensor) -> None:
        target = self._by_storage.get(_storage(into))
        if target is None:
            return
        if source.device.type != "cpu" or not self._staged.contains(source.data_ptr()) or source.dtype != target.dtype:
            target.computed = True
            return
        place = _place(into, target)
        target.pieces[place] = Piece(source.detach(), place)

    def check(self, *, complete: bool) -> Held:
        """Compare. ``complete``: a parameter without any value of this version is an error, too.

        Raises DataError(``held_weights``) naming the first parameter that differs.
        """
        names = {module: name for name, module in self._model.named_modules()}
        sources = self._sources()
        result = Held()
        for module, name, parameter in _tensors(self._model, buffers=False):
            full = f"{names[module]}.{name}".lstrip(".")
            target = self._targets.get((module, name))
            if target is None or not (target.pieces or target.computed):
                target = sources.get(_storage(parameter)) if parameter.numel() else None
            if target is None:
                if complete:
                    raise self._wrong(f"{full} was given no value")
                result.converted.append(full)
            elif target.computed or not _plain(module):
                result.converted.append(full)
            elif complete and target.values < target.shape.numel():
                raise self._wrong(f"{full} was given {target.values} of {target.shape.numel()} values")
            else:
                self._compare(full, module, parameter, target, result)
        return result

    def _sources(self) -> dict[int, _Target]:
        """Parameters of this version by the storage they are held in: where aliases find their value."""
        return {
            _storage(parameter): target
            for module, name, parameter in _tensors(self._model, buffers=False)
            if parameter.numel() and (target := self._targets.get((module, name))) is not None and target.pieces
        }

    def _compare(
        self,
        full: str,
        module: torch.nn.Module,
        parameter: torch.Tensor,
        target: _Target,
        result: Held,
    ) -> None:
        kernel: Kernel | None = getattr(module, "cpu_linear", None) if len(target.shape) == 2 else None
        if target.compared == _storage(parameter):
            pass  # an alias of what was just compared
        elif (parameter.shape, parameter.stride(), parameter.dtype) == (target.shape, target.stride, target.dtype):
            for piece in target.pieces.values():
                if not _same(piece.of(parameter.detach()), piece.source):
                    raise self._wrong(f"{full} differs from the staged copy")
                result.nbytes += piece.source.nbytes
            target.compared = _storage(parameter)
        elif kernel is None:
            result.converted.append(full)
        if kernel is not None:
            if kernel is self._packed_before.get(module):
                raise self._wrong(f"the packed copy of {full} is that of an earlier version")
            if any(piece.place[1] != (target.shape[1], 1) for piece in target.pieces.values()):
                result.converted.append(full)  # not put there as blocks of rows and columns
                return
            if not _columns_same(kernel, parameter, target, int(self._staged.manifest.digest[:8], 16)):
                raise self._wrong(f"the packed copy of {full} differs from the staged copy")
            result.packed += 1

    def _wrong(self, what: str) -> DataError:
        return DataError(_DIFFERS, f"after loading version {self._staged.manifest.version} {what}")


def packed_kernels(model: torch.nn.Module) -> dict[torch.nn.Module, Kernel]:
    """Each module's packed kernel: vLLM makes a new one whenever it packs a weight."""
    found = ((module, getattr(module, "cpu_linear", None)) for module in model.modules())
    return {module: kernel for module, kernel in found if kernel is not None}


def _plain(module: torch.nn.Module) -> bool:
    method = getattr(module, "quant_method", None)
    return method is None or type(method).__name__ in _PLAIN


def _tensors(model: torch.nn.Module, *, buffers: bool = True) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    for module in model.modules():
        held = {**module._parameters, **module._buffers} if buffers else module._parameters
        for name, tensor in held.items():
            if tensor is not None:
                yield module, name, tensor


def _place(into: torch.Tensor, target: _Target) -> Place:
    return tuple(into.shape), into.stride(), int(into.storage_offset()) - target.start


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _same(held: torch.Tensor, staged: torch.Tensor) -> bool:
    """Bit by bit (a NaN equals itself). On a GPU the staged bytes follow in slabs, so that no second model is needed there."""
    integer = _INTEGERS[held.element_size()]
    if held.dtype != torch.bool:
        held, staged = held.view(integer), staged.view(integer)
    if held.device.type == "cpu" or held.ndim == 0:
        return torch.equal(held, staged.to(held.device))
    rows = max(1, _SLAB_BYTES * len(held) // max(1, held.nbytes))
    return all(
        torch.equal(part, other.to(held.device))
        for part, other in zip(held.split(rows), staged.split(rows), strict=True)
    )


def _columns_same(kernel: Kernel, parameter: torch.Tensor, target: _Target, seed: int) -> bool:
    """Whether unit vectors give the staged columns: sums of one value and zeros, hence exact in every type."""
    width = target.shape[1]
    count = min(_COLUMNS, width)
    first = seed % (width - count + 1)
    units = torch.zeros(count, width, dtype=target.dtype)
    units[:, first : first + count] = torch.eye(count, dtype=target.dtype)
    with torch.no_grad():
        found = kernel(units, parameter, None).t()
    expected = torch.zeros(target.shape[0], count, dtype=target.dtype)
    for piece in target.pieces.values():
        _fill_columns(expected, piece, width, first)
    return torch.equal(found, expected)


def _fill_columns(into: torch.Tensor, piece: Piece, width: int, first: int) -> None:
    """Put the part of a block that lies in columns ``first`` … of a weight of ``width`` columns at its place."""
    height, across = piece.source.shape
    row, column = divmod(piece.place[2], width)
    left, right = max(first, column), min(first + into.shape[1], column + across)
    if left < right:
        into[row : row + height, left - first : right - first] = piece.source[:, left - column : right - column]
