"""One writer per shard: claim ``WRITER-N.h5.partial``, gather rows, write, fsync, rename to ``WRITER-N.DIGEST.h5`` (sealed, immutable).

A shard is laid out when it is sealed, its datasets contiguous and each written in one piece: nothing is ever appended to a file, and
the many small writes of a growing HDF5 file never meet a shared file system. Its digest is that of the bytes in the file. A writer
killed at any time leaves at most one ``.partial`` file, which nobody reads. Names are claimed by exclusive creation and never used
twice.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.errors import UserError
from hpcrl.trajectory.names import sealed_name, shard_number
from hpcrl.trajectory.schema import META_FIELDS, SCHEMA_NAME, SCHEMA_VERSION, Trajectory

__all__ = ["ShardWriter", "columns_of"]

_META_BLOCK = 1 << 14
"""Bytes; the metadata of a shard fits in one."""

_encode_fast = msgspec.json.Encoder().encode  # seven times as fast as json: transcripts are a third of a shard
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def _as_json(value: Any) -> bytes:
    try:
        return _encode_fast(value)
    except (UnicodeEncodeError, TypeError):
        # surrogatepass: a transcript may hold half a surrogate pair, and json.loads reads it back the same way.
        return _encode(value).encode("utf-8", "surrogatepass")


def _meta(trajectory: Trajectory) -> bytes:
    return _as_json({name: getattr(trajectory, name) for name in META_FIELDS})


_ARRAYS: tuple[tuple[str, str, Any, Callable[[Trajectory], NDArray[Any]]], ...] = (
    ("token_ids", "token_offsets", np.int32, lambda t: t.token_ids),
    ("logprobs", "token_offsets", np.float32, lambda t: t.logprobs),
    ("loss_mask", "token_offsets", np.uint8, lambda t: t.loss_mask),
    ("segments", "segment_offsets", np.int32, lambda t: t.segments),
    ("spans", "span_offsets", np.int32, lambda t: t.spans),
)
"""Dataset, the offsets that cut it into rows, type, and where a row's part comes from."""
_TEXTS: tuple[tuple[str, str, Callable[[Trajectory], bytes]], ...] = (
    ("meta", "meta_offsets", _meta),
    ("messages", "messages_offsets", lambda t: _as_json(list(t.messages))),
)
_PER_ROW: tuple[tuple[str, Callable[[Trajectory], float]], ...] = (
    ("reward", lambda t: t.reward),
    ("first_token_at", lambda t: t.first_token_at),
)


def columns_of(trajectories: Sequence[Trajectory]) -> dict[str, NDArray[Any]]:
    """All datasets of a shard of these rows by name; offsets begin with 0."""
    columns: dict[str, NDArray[Any]] = {}

    def add(name: str, offsets: str, values: NDArray[Any], lengths: Iterable[int]) -> None:
        columns[name] = values
        if offsets not in columns:
            columns[offsets] = np.cumsum([0, *lengths], dtype=np.int64)

    for name, offsets, dtype, part in _ARRAYS:
        arrays = [part(trajectory) for trajectory in trajectories]
        add(name, offsets, np.concatenate(arrays, dtype=dtype), map(len, arrays))
    for name, offsets, text in _TEXTS:
        texts = [text(trajectory) for trajectory in trajectories]
        add(name, offsets, np.frombuffer(b"".join(texts), np.uint8), map(len, texts))
    for name, value in _PER_ROW:
        columns[name] = np.array([value(trajectory) for trajectory in trajectories], np.float64)
    return columns


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
        rows = self.rows
        _lay_out(self._partial, self._writer_id, self._trajectories)
        with open(self._partial, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
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


def _lay_out(path: Path, writer_id: str, trajectories: Sequence[Trajectory]) -> None:
    """Write the whole HDF5 file of these rows to ``path``: each dataset in one piece, the metadata gathered in one block."""
    columns = columns_of(trajectories)
    with h5py.File(path, "w", locking=False, meta_block_size=_META_BLOCK) as file:
        file.attrs.update(schema=SCHEMA_NAME, version=SCHEMA_VERSION, writer=writer_id)
        for column, values in columns.items():
            _write(file, column, values)


def _write(file: h5py.File, name: str, values: NDArray[Any]) -> None:
    """As ``file.create_dataset(name, data=values)``, at a third of its time: a shard is many small datasets."""
    kind = h5py.h5t.py_create(values.dtype, logical=True)
    dataset = h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple(values.shape))
    if values.size:
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, values)


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
