"""One writer per shard: append to ``NAME.h5.partial``, then close, fsync and rename to ``NAME.h5`` (sealed, immutable).

A writer killed at any time leaves at most one ``.partial`` file, which nobody reads. Names are claimed by exclusive creation:
opening an HDF5 file for writing twice corrupts it even though the second open raises.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcrl.errors import UserError
from hpcrl.trajectory.schema import META_FIELDS, SCHEMA_NAME, SCHEMA_VERSION, SPAN_COLUMNS, Trajectory

__all__ = ["ShardWriter"]

_CHUNK = 16384
"""Elements per HDF5 chunk of a flat array."""
_OFFSET_CHUNK = 1024


def _as_bytes(value: Any) -> NDArray[np.uint8]:
    # surrogatepass: a transcript may hold half a surrogate pair, and json.loads reads it back the same way.
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)


def _meta(trajectory: Trajectory) -> NDArray[np.uint8]:
    return _as_bytes({name: getattr(trajectory, name) for name in META_FIELDS})


_COLUMNS: tuple[tuple[str, str, Any, Callable[[Trajectory], NDArray[Any]]], ...] = (
    ("token_ids", "token_offsets", np.int32, lambda t: t.token_ids),
    ("logprobs", "token_offsets", np.float32, lambda t: t.logprobs),
    ("loss_mask", "token_offsets", np.uint8, lambda t: t.loss_mask),
    ("segments", "segment_offsets", np.int32, lambda t: t.segments),
    ("spans", "span_offsets", np.int32, lambda t: t.spans),
    ("meta", "meta_offsets", np.uint8, _meta),
    ("messages", "messages_offsets", np.uint8, lambda t: _as_bytes(list(t.messages))),
    ("reward", "", np.float64, lambda t: np.array([t.reward])),
    ("first_token_at", "", np.float64, lambda t: np.array([t.first_token_at])),
)
"""Dataset, the offsets that cut it into rows (none: one element per row), type, and where a row's part comes from."""


class ShardWriter:
    """Writes trajectories of one process into one shard after another under ``directory``.

    ``writer_id`` (for example ``cpu1-0``) must be unique among live writers. Rows become visible to readers only by
    :meth:`seal`. Appends are buffered and written ``batch`` at a time. Not safe for concurrent use.
    """

    def __init__(self, directory: Path, writer_id: str, *, batch: int = 32) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", writer_id):
            raise UserError(f"writer id {writer_id!r}: use letters, digits, dot, dash and underscore")
        self._directory = Path(directory)
        self._writer_id = writer_id
        self._batch = batch
        self._number = 0
        self._pending: list[Trajectory] = []
        self._rows = 0
        self._file: h5py.File | None = None
        self._path: Path | None = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    @property
    def rows(self) -> int:
        """Rows of the shard being written."""
        return self._rows

    def append(self, trajectory: Trajectory) -> int:
        """Add a trajectory (validated first) and return its row in the shard being written. Raises DataError."""
        self._pending.append(trajectory.validate())
        self._rows += 1
        if len(self._pending) >= self._batch:
            self._flush()
        return self._rows - 1

    def seal(self) -> tuple[Path, int]:
        """Finish the shard; from now on it is readable and never changes. Returns its path and number of rows.

        The next append begins a new shard. Raises UserError when nothing was appended.
        """
        if not self._rows:
            raise UserError("a shard without rows cannot be sealed: append a trajectory first")
        self._flush()
        partial, rows = self._close()
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        sealed = partial.with_suffix("")
        os.rename(partial, sealed)
        _fsync_directory(self._directory)
        return sealed, rows

    def abandon(self) -> None:
        """Drop the shard being written, rows and all."""
        if self._file is not None:
            self._close()[0].unlink(missing_ok=True)
        self._pending, self._rows = [], 0

    def _close(self) -> tuple[Path, int]:
        if self._file is None or self._path is None:
            raise RuntimeError("no shard is open")
        self._file.close()
        path, rows = self._path, self._rows
        self._file, self._path, self._rows = None, None, 0
        return path, rows

    def _open(self) -> h5py.File:
        """Claim the next free name and lay out the empty shard."""
        self._directory.mkdir(parents=True, exist_ok=True)
        while True:
            sealed = self._directory / f"{self._writer_id}-{self._number:05d}.h5"
            self._number += 1
            if sealed.exists():
                continue
            path = sealed.with_suffix(".h5.partial")
            try:
                # The default file format, not libver="latest": that one cannot be opened for repair after a kill.
                file = h5py.File(path, "x", locking=False)
            except FileExistsError:
                continue
            self._path = path
            break
        file.attrs.update(schema=SCHEMA_NAME, version=SCHEMA_VERSION, writer=self._writer_id)
        for name, offsets, dtype, _ in _COLUMNS:
            width = (len(SPAN_COLUMNS),) if name == "spans" else ()
            chunk = _CHUNK if offsets in {"token_offsets", "meta_offsets", "messages_offsets"} else _OFFSET_CHUNK
            file.create_dataset(name, (0, *width), dtype, maxshape=(None, *width), chunks=(chunk, *width))
            if offsets and offsets not in file:
                file.create_dataset(offsets, data=np.zeros(1, np.int64), maxshape=(None,), chunks=(_OFFSET_CHUNK,))
        return file

    def _flush(self) -> None:
        if not self._pending:
            return
        if self._file is None:
            self._file = self._open()
        extended: set[str] = set()
        for name, offsets, _, part in _COLUMNS:
            parts = [part(trajectory) for trajectory in self._pending]
            start = _extend(self._file[name], parts)
            if offsets and offsets not in extended:
                extended.add(offsets)
                ends = start + np.cumsum([len(part) for part in parts], dtype=np.int64)
                _extend(self._file[offsets], [ends])
        self._pending = []


def _extend(dataset: h5py.Dataset, parts: Sequence[NDArray[Any]]) -> int:
    """Append the concatenated parts; returns where they start."""
    start = len(dataset)
    values = np.concatenate(parts)
    if len(values):
        dataset.resize(start + len(values), axis=0)
        dataset[start:] = values
    return start


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
