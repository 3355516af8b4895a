"""One writer per shard: claim ``WRITER-N.h5.partial``, append, then write, fsync, rename to ``WRITER-N.DIGEST.h5`` (sealed, immutable).

The shard grows in memory (HDF5's core driver) and reaches the disk in one piece when it is sealed, so that its digest is that of the
bytes written, and the many small writes of HDF5 never meet a shared file system. A writer killed at any time leaves at most one
``.partial`` file, which nobody reads. Names are claimed by exclusive creation and never used twice.
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
from hpcrl.trajectory.names import sealed_name, shard_number
from hpcrl.trajectory.schema import META_FIELDS, SCHEMA_NAME, SCHEMA_VERSION, SPAN_COLUMNS, Trajectory

__all__ = ["ShardWriter"]

_CHUNK = 16384
"""Elements per HDF5 chunk of a flat array."""
_OFFSET_CHUNK = 1024
_GROWTH = 1 << 20
"""Bytes by which a shard grows in memory."""


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def _as_bytes(value: Any) -> NDArray[np.uint8]:
    # surrogatepass: a transcript may hold half a surrogate pair, and json.loads reads it back the same way.
    return np.frombuffer(_encode(value).encode("utf-8", "surrogatepass"), dtype=np.uint8)


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
        self._number: int | None = None
        self._pending: list[Trajectory] = []
        self._rows = 0
        self._file: h5py.File | None = None
        self._partial: Path | None = None

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
        if self._file is None or self._partial is None:
            raise RuntimeError("rows were appended, but no shard is open")
        self._file.flush()
        content = self._file.id.get_file_image()
        partial, rows = self._partial, self._rows
        with open(partial, "r+b") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        sealed = sealed_name(partial, content)
        os.rename(partial, sealed)
        _fsync_directory(self._directory)
        self._forget()
        return sealed, rows

    def abandon(self) -> None:
        """Drop the shard being written, rows and all."""
        if self._partial is not None:
            self._partial.unlink(missing_ok=True)
        self._forget()

    def _forget(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._partial, self._rows, self._pending = None, None, 0, []

    def _claim(self) -> Path:
        """Create the next free ``.partial`` name exclusively: neither a live writer nor an earlier one has used its number."""
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._number is None:
            used = (shard_number(path.name, self._writer_id) for path in self._directory.iterdir())
            self._number = max((number for number in used if number is not None), default=-1) + 1
        while True:
            path = self._directory / f"{self._writer_id}-{self._number:05d}.h5.partial"
            self._number += 1
            try:
                open(path, "xb").close()
            except FileExistsError:
                continue
            return path

    def _open(self) -> h5py.File:
        """Claim a name and lay out the empty shard in memory."""
        self._partial = self._claim()
        file = h5py.File(self._partial, "w", driver="core", backing_store=False, block_size=_GROWTH)
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
