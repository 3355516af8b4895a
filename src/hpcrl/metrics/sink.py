"""Where metrics go: one JSONL file per process, and TensorBoard event files where asked for.

A line is ``{"t": seconds since the epoch, "step"?: training step, NAME: value, …}``. Files are appended to, so that a process that
is started again goes on in its own file. A reader may meet an unfinished last line of a killed process: ``read_metrics`` drops it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from hpcrl.metrics.names import metric

__all__ = ["MetricsWriter", "Value", "read_metrics"]

Value = float | int | Mapping[str, float]
"""A number, or for a histogram bucket → count."""


class MetricsWriter:
    """Appends to ``metrics/ROLE-INDEX.jsonl`` of the run directory.

    ``tensorboard=True`` also writes event files under ``metrics/tensorboard``. Numbers that are not finite are written as
    null. Not safe for concurrent use.
    """

    def __init__(self, run_dir: Path, role: str, index: int | str, *, tensorboard: bool = False) -> None:
        folder = Path(run_dir) / "metrics"
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{role}-{index}.jsonl"
        _end_last_line(self.path)
        self._file: TextIO = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed in close()
        self._board = _Board(folder / "tensorboard") if tensorboard else None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, values: Mapping[str, Value], step: int | None = None) -> None:
        """Write one line and flush it. Raises UserError for a name that metrics/names.py does not list."""
        for name in values:
            metric(name)
        line: dict[str, Any] = {"t": round(time.time(), 3)}
        if step is not None:
            line["step"] = step
        line.update({name: _plain(value) for name, value in values.items()})
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        if self._board is not None and step is not None:
            self._board.write(values, step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


class _Board:
    """TensorBoard scalars; histograms become one scalar per bucket."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary import Writer  # heavy, and only the trainer wants it

        self._writer = Writer(str(folder))

    def write(self, values: Mapping[str, Value], step: int) -> None:
        for name, value in values.items():
            tag = f"{metric(name).layer}/{name}"
            parts = (
                {f"{tag}/{key}": part for key, part in value.items()} if isinstance(value, Mapping) else {tag: value}
            )
            for part_tag, part in parts.items():
                self._writer.add_scalar(part_tag, float(part), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of one process's file; an unfinished or damaged line (its writer was killed) is left out."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if not isinstance(line, dict):
                continue
            if isinstance(line.get("t"), int | float) and isinstance(line.get("step"), int | None):
                yield line


def _plain(value: Value) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return value if isinstance(value, int) or math.isfinite(value) else None


def _end_last_line(path: Path) -> None:
    """Close the line that a killed predecessor left open, else our first line would be lost with it."""
    if path.exists() and path.stat().st_size:
        with open(path, "rb+") as file:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
