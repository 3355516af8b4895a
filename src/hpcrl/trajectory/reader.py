"""Reads sealed shards. A shard that cannot be read is named in a DataError; it never yields part of a row.

``ShardReader`` loads a whole shard into memory: shards hold a few dozen rows, and readers want most of them. Its bytes must have the
digest that its name carries; what matches is what a writer validated, so that rows need no second validation. ``ShardCache`` keeps the
shards that are being consumed.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcrl.errors import DataError
from hpcrl.trajectory.names import digest_in_name, digest_of
from hpcrl.trajectory.schema import META_FIELDS, SCHEMA_NAME, SCHEMA_VERSION, Trajectory

__all__ = ["LazyMessages", "ShardCache", "ShardReader"]

_FLAT = {
    "token_ids": ("token_offsets", np.int32),
    "logprobs": ("token_offsets", np.float32),
    "loss_mask": ("token_offsets", np.uint8),
    "segments": ("segment_offsets", np.int32),
    "spans": ("span_offsets", np.int32),
    "meta": ("meta_offsets", np.uint8),
    "messages": ("messages_offsets", np.uint8),
}
_PER_ROW = {"reward": np.float64, "first_token_at": np.float64}


_META = frozenset(META_FIELDS)


class LazyMessages(Sequence[Any]):
    """A transcript that is parsed when somebody looks at it: training never does. ``where`` names it in errors."""

    __slots__ = ("_parsed", "_text", "_where")

    def __init__(self, text: NDArray[np.uint8], where: str = "") -> None:
        self._text = text
        self._where = where
        self._parsed: list[Any] | None = None

    def _list(self) -> list[Any]:
        if self._parsed is None:
            try:
                self._parsed = json.loads(self._text.tobytes())
            except ValueError as error:
                raise DataError("bad_shard", f"{self._where}: messages are not valid JSON: {error}") from error
        return self._parsed

    def __len__(self) -> int:
        return len(self._list())

    def __getitem__(self, index: Any) -> Any:
        return self._list()[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._list() == list(other)

    def __hash__(self) -> int:
        return hash(self._text.tobytes())

    def __repr__(self) -> str:
        return repr(self._list())


class ShardReader:
    """All rows of one sealed shard. Raises DataError (reason ``bad_shard``) naming the file when it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        if self.path.suffix != ".h5":
            raise self._bad("not a sealed shard (expected a name ending in .h5)")
        self._arrays: dict[str, NDArray[Any]] = {}
        try:
            content = self.path.read_bytes()
            told = digest_in_name(self.path.name)
            if told is not None and told != digest_of(content):
                raise self._bad(f"its bytes ({len(content)}) do not have the digest in its name: truncated or altered")
            self._verified = told is not None
            with h5py.File(h5py.h5f.open_file_image(content), "r") as file:
                self._load(file)
        except (OSError, KeyError, RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise self._bad(" ".join(str(error).split())) from error
        self._check()

    def _bad(self, text: str) -> DataError:
        return DataError("bad_shard", f"{self.path}: {text}")

    def _load(self, file: h5py.File) -> None:
        schema, version = file.attrs.get("schema"), file.attrs.get("version")
        if schema != SCHEMA_NAME or version != SCHEMA_VERSION:
            raise self._bad(
                f"schema {schema} version {version}; this reader knows {SCHEMA_NAME} version {SCHEMA_VERSION}"
            )
        for name, (offsets, _) in _FLAT.items():
            self._arrays[name] = file[name][()]
            self._arrays.setdefault(offsets, file[offsets][()])
        for name in _PER_ROW:
            self._arrays[name] = file[name][()]

    def _check(self) -> None:
        """Offsets must cut every flat array completely, else rows of a damaged file would look like shorter rows."""
        rows = len(self)
        for name, (offsets_name, dtype) in _FLAT.items():
            offsets, array = self._arrays[offsets_name], self._arrays[name]
            if array.dtype != dtype:
                raise self._bad(f"{name} is {array.dtype}, expected {np.dtype(dtype)}")
            if len(offsets) != rows + 1 or offsets[0] != 0 or offsets[-1] != len(array) or (np.diff(offsets) < 0).any():
                raise self._bad(f"{offsets_name} does not fit {name}")
        if len(self._arrays["first_token_at"]) != rows:
            raise self._bad("first_token_at does not fit reward")

    def __len__(self) -> int:
        return len(self._arrays["reward"])

    def __iter__(self) -> Iterator[Trajectory]:
        return (self.read(row) for row in range(len(self)))

    def _part(self, name: str, row: int) -> NDArray[Any]:
        offsets = self._arrays[_FLAT[name][0]]
        return self._arrays[name][offsets[row] : offsets[row + 1]]

    def _json(self, name: str, row: int) -> Any:
        try:
            return json.loads(self._part(name, row).tobytes())
        except ValueError as error:
            raise self._bad(f"row {row}: {name} is not valid JSON") from error

    def read(self, row: int) -> Trajectory:
        """Row ``row``; arrays are views into the shard. Validated here when the name carries no digest. Raises DataError."""
        if not 0 <= row < len(self):
            raise self._bad(f"has {len(self)} rows, row {row} does not exist")
        meta = self._json("meta", row)
        if meta.keys() != _META:
            raise self._bad(f"row {row}: meta holds {sorted(meta)}, expected {sorted(META_FIELDS)}")
        trajectory = Trajectory(
            **meta,
            token_ids=self._part("token_ids", row),
            logprobs=self._part("logprobs", row),
            loss_mask=self._part("loss_mask", row),
            segments=self._part("segments", row),
            spans=self._part("spans", row),
            reward=float(self._arrays["reward"][row]),
            first_token_at=float(self._arrays["first_token_at"][row]),
            messages=LazyMessages(self._part("messages", row), f"{self.path}: row {row}"),
        )
        return trajectory if self._verified else trajectory.validate()


class ShardCache:
    """Reads rows by (shard, row); keeps the ``keep`` most recently used shards in memory.

    ``root`` is the run directory, against which relative shard paths are taken. A shard that was sealed on another node may
    show up late on a network file system: a missing file is looked for during ``patience_s`` seconds.
    """

    def __init__(self, root: Path, *, keep: int = 64, patience_s: float = 30.0) -> None:
        self._root = Path(root)
        self._keep = keep
        self._patience_s = patience_s
        self._shards: OrderedDict[str, ShardReader] = OrderedDict()

    def bad_among(self, shards: Iterable[str]) -> dict[str, str]:
        """Load these shards; those that cannot be read, with the reason."""
        bad = {}
        for shard in sorted(set(shards)):
            try:
                self._shard(shard)
            except DataError as error:
                bad[shard] = str(error)
        return bad

    def read(self, shard: str, row: int) -> Trajectory:
        """One trajectory. Raises DataError naming the shard."""
        return self._shard(shard).read(row)

    def read_many(self, refs: Sequence[tuple[str, int]]) -> list[Trajectory]:
        """Trajectories in the order of ``refs``; each shard is opened once. Raises DataError naming the shard."""
        found: dict[tuple[str, int], Trajectory] = {}
        for shard, row in sorted(set(refs)):
            found[shard, row] = self.read(shard, row)
        return [found[ref] for ref in refs]

    def _shard(self, shard: str) -> ShardReader:
        reader = self._shards.get(shard)
        if reader is None:
            reader = self._shards[shard] = self._open(self._root / shard)
            while len(self._shards) > self._keep:
                self._shards.popitem(last=False)
        self._shards.move_to_end(shard)
        return reader

    def _open(self, path: Path) -> ShardReader:
        deadline = time.monotonic() + self._patience_s
        while not path.exists():
            if time.monotonic() > deadline:
                raise DataError("bad_shard", f"{path}: does not exist ({self._patience_s:g} s waited)")
            time.sleep(0.05)
        return ShardReader(path)
