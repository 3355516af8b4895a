"""Trajectories → one JSON Lines or Parquet file, for tools that do not read HDF5. Written whole or not at all.

Parquet needs pyarrow (``pip install hpcrl[export]``): lists stay lists, spans become four lists, requests and messages JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from hpcrl.errors import EnvironmentFault, UserError
from hpcrl.protocol.rundir import publish
from hpcrl.trajectory.schema import SPAN_COLUMNS, Trajectory

__all__ = ["export_trajectories"]

Source = Iterable[tuple[Path, int, Trajectory]]
_SPANS = {f"span_{name}": "int32" for name in SPAN_COLUMNS}
_ROWS = 256
"""Trajectories per Parquet row group, and at once in memory."""


def export_trajectories(source: Source, out: Path) -> int:
    """Write all of ``source`` (shard, row, trajectory) to ``out``; its suffix says how. Returns the number written.

    Raises UserError for another suffix, EnvironmentFault when pyarrow is missing.
    """
    writers = {".jsonl": _jsonl, ".parquet": _parquet}
    if out.suffix not in writers:
        raise UserError(f"{out}: export writes {' or '.join(writers)} files")
    with publish(out) as temporary:
        return writers[out.suffix](source, temporary)


def _jsonl(source: Source, path: Path) -> int:
    count = 0
    with open(path, "x", encoding="utf-8", errors="surrogatepass") as file:
        for shard, row, trajectory in source:
            file.write(json.dumps({"shard": shard.name, "row": row, **_plain(trajectory)}, ensure_ascii=False) + "\n")
            count += 1
    return count


def _plain(trajectory: Trajectory) -> dict[str, Any]:
    values = {name: getattr(trajectory, name) for name in Trajectory.__dataclass_fields__}
    plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in values.items()}
    return plain | {"messages": list(trajectory.messages)}


def _parquet(source: Source, path: Path) -> int:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise EnvironmentFault("Parquet needs pyarrow: pip install pyarrow, or export to .jsonl") from error
    lists = {"token_ids": "int32", "logprobs": "float32", "loss_mask": "uint8", "segments": "int32", **_SPANS}
    numbers = {"row": "int32", "reward": "float64", "first_token_at": "float64"}
    names = ["shard", "row", *(name for name in Trajectory.__dataclass_fields__ if name != "spans"), *_SPANS]
    types = {name: pyarrow.list_(getattr(pyarrow, kind)()) for name, kind in lists.items()}
    types |= {name: getattr(pyarrow, kind)() for name, kind in numbers.items()}
    schema = pyarrow.schema([(name, types.get(name, pyarrow.string())) for name in names])
    count = 0
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for rows in _chunks(source):
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
            count += len(rows)
    return count


def _chunks(source: Source) -> Iterator[list[dict[str, Any]]]:
    rows = iter(source)
    while chunk := [_flat(*row) for row in islice(rows, _ROWS)]:
        yield chunk


def _flat(shard: Path, row: int, trajectory: Trajectory) -> dict[str, Any]:
    values = _plain(trajectory)
    spans = values.pop("spans")
    for index, name in enumerate(_SPANS):
        values[name] = [span[index] for span in spans]
    for name in ("rewards", "timings", "requests", "messages"):
        values[name] = json.dumps(values[name])
    return {"shard": shard.name, "row": row, **values}
