"""The plugin inside vLLM that loads a staged version: entry point ``hpcrl_weights`` of ``vllm.general_plugins``.

    replica process           vLLM API server          vLLM worker (vllm_transfer.py)
    ---------------           ---------------          ------------------------------
    check_staged: the file's digests are the manifest's            (tokens are still generated)
    /start_weight_update  ─▶  collective_rpc      ─▶  start_weight_update, between two steps of the engine
    /pause
    /update_weights       ─▶  collective_rpc      ─▶  receive_weights: map the file, reload layer by layer
    /finish_weight_update ─▶  collective_rpc      ─▶  finish_weight_update: finalize, repair the tied head, compare what is held

Every worker of a tensor-parallel replica maps the same file; the model's own loader takes its share. Nothing of vLLM or torch is
imported before vLLM itself calls ``register``; vLLM does that in several processes, in some of them twice.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.errors import DataError
from hpcrl.weights.digest import chunk_digest, digest_threads, whole_digest
from hpcrl.weights.manifest import Manifest

if TYPE_CHECKING:
    import torch

__all__ = ["BACKEND", "UNTOUCHED", "StagedWeights", "check_staged", "register", "update_info"]

BACKEND = "hpcrl"
"""The value of ``backend`` in vLLM's ``--weight-transfer-config``."""

UNTOUCHED = "staged_weights"
"""Reason of an update refused before the model was changed: the old version may go on serving."""


def register() -> None:
    """Make the backend known to vLLM; calling it again does nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # there is no public query
        WeightTransferEngineFactory.register_engine(BACKEND, "hpcrl.weights.vllm_transfer", "ShmWeightTransferEngine")


def update_info(manifest: Manifest | Path, staging: Path) -> dict[str, Any]:
    """The ``update_info`` of ``/update_weights``: a manifest (or its JSON file) and the staging file on the same node."""
    content = str(manifest) if isinstance(manifest, Path) else manifest.to_dict()
    return {"manifest": content, "staging": str(staging)}


def check_staged(manifest: Path, staging: Path) -> None:
    """Take the digests of a staging file again, just before it is loaded and without pausing anything for it.

    Raises DataError when they are not those of the manifest, or one of the files cannot be read.
    """
    expected = _read(manifest)
    data = memoryview(_map(staging, expected.nbytes))
    with digest_threads() as threads:
        found = list(threads.map(chunk_digest, (data[c.offset : c.offset + c.nbytes] for c in expected.chunks)))
    for chunk, digest in zip(expected.chunks, found, strict=True):
        if digest != chunk.digest:
            raise DataError(
                UNTOUCHED, f"version {expected.version}: the chunk at byte {chunk.offset} differs from its manifest"
            )
    if whole_digest(found) != expected.digest:
        raise DataError(UNTOUCHED, f"version {expected.version}: the whole differs from its manifest")


class StagedWeights:
    """The tensors of one staging file, as views in manifest order; iterate as often as needed. Their bytes were checked before.

    The views share memory with a private mapping of the file: keep this object until the loader is done, and do not rewrite
    the file meanwhile. Raises DataError(``staged_weights``) when the file cannot hold them.
    """

    def __init__(self, manifest: Manifest, staging: Path) -> None:
        self.manifest = manifest
        self._map = _map(staging, manifest.nbytes)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) if manifest.nbytes else 0

    @classmethod
    def open(cls, manifest: str | dict[str, Any], staging: str) -> StagedWeights:
        """From an ``update_info``. Raises DataError for whatever cannot be read."""
        read = Manifest.from_dict(manifest) if isinstance(manifest, dict) else _read(Path(manifest))
        return cls(read, Path(staging))

    def contains(self, address: int) -> bool:
        """Whether a memory address lies in the mapping."""
        return self._start <= address < self._start + self.manifest.nbytes

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        for entry in self.manifest.tensors:
            dtype = getattr(torch, entry.dtype)
            if entry.nbytes == 0:
                yield entry.name, torch.empty(entry.shape, dtype=dtype)
                continue
            count = entry.nbytes // dtype.itemsize
            yield (
                entry.name,
                torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.offset).view(entry.shape),
            )


def _read(manifest: Path) -> Manifest:
    try:
        text = manifest.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(UNTOUCHED, f"cannot read the manifest: {error}") from error
    return Manifest.from_json(text)


def _map(staging: Path, nbytes: int) -> mmap.mmap | bytearray:
    """Map ``nbytes`` of the file privately: torch wants writable memory, and the file must stay as it is."""
    try:
        descriptor = os.open(staging, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(UNTOUCHED, f"cannot open the staging file: {error}") from error
    try:
        held = os.fstat(descriptor).st_size
        if held < nbytes:
            raise DataError(UNTOUCHED, f"{staging} holds {held} bytes, the manifest says {nbytes}")
        return mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY) if nbytes else bytearray()
    finally:
        os.close(descriptor)
