"""One writer per shard: claim ``WRITER-N.h5.partial``, gather rows, write, fsync, rename to ``WRITER-N.DIGEST.h5`` (sealed, immutable).

A shard is laid out in memory when it is sealed (HDF5's core driver) and reaches the disk in one piece, so that its digest is that of
the bytes written, and the many small writes of HDF5 never meet a shared file system. As nothing is appended to a file, its datasets
are contiguous. A writer killed at any time leaves at most one ``.partial`` file, which nobody reads. Names are claimed by exclusive
creation and never used twice.
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
from hpcrl.trajectory.schema import META_FIELDS, SCHEMA_NAME, SCHEMA_VERSION, Trajectory

__all__ = ["COLUMNS", "ShardWriter"]

_OVERHEAD = 1 << 16
"""Bytes of a file beyond its arrays, generously: HDF5's memory is asked for once."""

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def _as_bytes(value: Any) -> NDArray[np.uint8]:
    # surrogatepass: a transcript may hold half a surrogate pair, and json.loads reads it back the same way.
    return np.frombuffer(_encode(value).encode("utf-8", "surrogatepass"), dtype=np.uint8)


def _meta(trajectory: Trajectory) -> NDArray[np.uint8]:
    return _as_bytes({name: getattr(trajectory, name) for name in META_FIELDS})


COLUMNS: tuple[tuple[str, str, Any, Callable[[Trajectory], NDArray[Any]]], ...] = (
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

    ``writer_id`` (for example ``cpu1-0``) must be unique among live writers. Rows are held in memory and become visible to readers
    only by :meth:`seal`. Not safe for concurrent use.
    """

    def __init__(self, directory: Path, writer_id: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", writer_id):
            raise UserError(f"writer id {writer_id!r}: use letters, digits, dot, dash and underscore")
        self._directory = Path(directory)
        self._writer_id = writer_id
        self._number: int | None = None
        self._trajectories: list[Trajectory] = []
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
        return len(self._trajectories)

    def append(self, trajectory: Trajectory) -> int:
        """Add a trajectory (validated first) and return its row in the shard being written. Raises DataError."""
        trajectory.validate()
        if self._partial is None:
            self._partial = self._claim()
        self._trajectories.append(trajectory)
        return self.rows - 1

    def seal(self) -> tuple[Path, int]:
        """Finish the shard; from now on it is readable and never changes. Returns its path and number of rows.

        The next append begins a new shard. Raises UserError when nothing was appended.
        """
        if self._partial is None:
            raise UserError("a shard without rows cannot be sealed: append a trajectory first")
        content, rows = _image(self._partial.name, self._writer_id, self._trajectories), self.rows
        with open(self._partial, "r+b", buffering=0) as file:
            file.write(content)
            os.fsync(file.fileno())
        sealed = sealed_name(self._partial, content)
        os.rename(self._partial, sealed)
        _fsync_directory(self._directory)
        self._trajectories, self._partial = [], None
        return sealed, rows

    def abandon(self) -> None:
        """Drop the shard being written, rows and all."""
        if self._partial is not None:
            self._partial.unlink(missing_ok=True)
        self._trajectories, self._partial = [], None

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


def _image(name: str, writer_id: str, trajectories: Sequence[Trajectory]) -> bytes:
    """The whole HDF5 file of these rows."""
    columns: dict[str, NDArray[Any]] = {}
    for column, offsets, dtype, part in COLUMNS:
        parts = [part(trajectory) for trajectory in trajectories]
        columns[column] = np.concatenate(parts, dtype=dtype)
        if offsets and offsets not in columns:
            columns[offsets] = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    size = sum(values.nbytes for values in columns.values()) + _OVERHEAD
    with h5py.File(name, "w", driver="core", backing_store=False, block_size=size) as file:
        file.attrs.update(schema=SCHEMA_NAME, version=SCHEMA_VERSION, writer=writer_id)
        for column, values in columns.items():
            file.create_dataset(column, data=values)
        file.flush()
        content: bytes = file.id.get_file_image()
    return content


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
