"""``hpcrl bench trajectory``: writing sealed shards and reading rows at random, against raw h5py and JSON Lines with the same content.

    write   trajectories ─► ShardWriter.append … seal            (checks, JSON, digest)
    raw     the same arrays ─► h5py: same datasets, chunks, batches of 32, close
    jsonl   the same trajectories ─► one JSON object per line
    read    rows of sealed shards in random order through ShardCache, shards in memory

All three end with an fsync of the file and one of its directory. Each way writes one shard of the same trajectories in turn with the
others, many times, and its best time counts: on a machine that others use, a short piece of work has a chance to run undisturbed.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpcrl.trajectory.reader import ShardCache
from hpcrl.trajectory.schema import SPAN_COLUMNS, Trajectory
from hpcrl.trajectory.writer import ShardWriter, columns_of

__all__ = ["measure"]

_ROWS = 128
"""Trajectories of the shard that is written."""
_BATCH = 32
_READS = 2_000
"""Rows read between two looks at the clock."""


def measure(quick: bool, say: Callable[[str], None]) -> dict[str, float | None]:
    """All numbers of the bench."""
    rounds = 3 if quick else 40
    trajectories = [_trajectory(index) for index in range(_ROWS)]
    tokens = sum(len(trajectory.token_ids) for trajectory in trajectories)
    columns = _columns(trajectories)
    ways: dict[str, Callable[[Path], None]] = {
        "hpcrl": lambda folder: _write_shard(folder, trajectories),
        "raw": lambda folder: _write_raw(folder, columns),
        "jsonl": lambda folder: _write_jsonl(folder, trajectories),
    }
    best = dict.fromkeys(ways, float("inf"))
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-", dir=".") as folder:
        for turn in range(rounds):
            for name, write in ways.items():
                target = Path(folder) / f"{name}-{turn}"
                target.mkdir()
                started = time.perf_counter()
                write(target)
                best[name] = min(best[name], time.perf_counter() - started)
        say(f"best of {rounds}: " + ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in best.items()))
        [shard] = (Path(folder) / "hpcrl-0").iterdir()
        size = shard.stat().st_size
        read_per_s = max(_random_reads(shard, turn) for turn in range(rounds))
    return {
        "write_ratio_raw": best["raw"] / best["hpcrl"],
        "write_ratio_jsonl": best["jsonl"] / best["hpcrl"],
        "read_per_s": read_per_s,
        "bytes_per_token": size / tokens,
        "write_mib_per_s": size / best["hpcrl"] / 2**20,
        "trajectories_per_s": _ROWS / best["hpcrl"],
    }


def _trajectory(index: int) -> Trajectory:
    """About 2,000 tokens in eight turns, half of them sampled, with a transcript of the same length."""
    rng = np.random.default_rng(index)
    tokens = int(rng.integers(1_000, 3_000))
    bounds = np.linspace(0, tokens, 17, dtype=int)
    spans = [(int(bounds[turn]), int(bounds[turn + 1]), 0, 7) for turn in range(1, 16, 2)]
    mask = np.zeros(tokens, np.uint8)
    for start, end, _, _ in spans:
        mask[start:end] = 1
    text = "".join(chr(97 + code) for code in rng.integers(0, 26, 4 * tokens // 16))
    messages = [{"role": "assistant" if turn % 2 else "user", "content": text} for turn in range(16)]
    return Trajectory(
        run_id="bench",
        task_id=f"task-{index % 100}",
        group_id=f"g{index // 8:06d}",
        rollout_id=f"g{index // 8:06d}-r{index % 8}",
        attempt_id=f"g{index // 8:06d}-r{index % 8}-a0",
        split="train",
        policy_version="0.7",
        environment_version="sha256:" + "e" * 64,
        verifier_version="sha256:" + "v" * 64,
        token_ids=rng.integers(0, 150_000, tokens, dtype=np.int32),
        logprobs=np.where(mask, -rng.random(tokens), 0).astype(np.float32),
        loss_mask=mask,
        segments=np.array([0], np.int32),
        spans=np.array(spans, np.int32),
        reward=float(index % 2),
        first_token_at=1.7e9 + index,
        rewards={"reward": float(index % 2)},
        timings={"model": 12.5, "commands": 3.25, "sandbox_start": 0.06},
        requests=[
            {"request_id": f"q{turn}", "start": start, "end": end} for turn, (start, end, _, _) in enumerate(spans)
        ],
        messages=messages,
    )


def _write_shard(folder: Path, trajectories: Sequence[Trajectory]) -> None:
    writer = ShardWriter(folder, "bench")
    for trajectory in trajectories:
        writer.append(trajectory)
    writer.seal()


def _columns(trajectories: Sequence[Trajectory]) -> list[dict[str, NDArray[Any]]]:
    """Batches of finished columns: what a writer without checks, identities and JSON would be handed."""
    return [columns_of(trajectories[start : start + _BATCH]) for start in range(0, len(trajectories), _BATCH)]


def _write_raw(folder: Path, columns: list[dict[str, NDArray[Any]]]) -> None:
    path = folder / "raw.h5"
    with h5py.File(path, "x", locking=False) as file:
        for name, values in columns[0].items():
            width = (len(SPAN_COLUMNS),) if name == "spans" else ()
            chunk = 16384 if values.dtype.itemsize < 8 else 1024
            file.create_dataset(name, (0, *width), values.dtype, maxshape=(None, *width), chunks=(chunk, *width))
        for batch in columns:
            for name, values in batch.items():
                dataset, start = file[name], len(file[name])
                dataset.resize(start + len(values), axis=0)
                dataset[start:] = values
    _fsync(path)


def _write_jsonl(folder: Path, trajectories: Sequence[Trajectory]) -> None:
    path = folder / "lines.jsonl"
    with open(path, "x", encoding="utf-8") as file:
        for trajectory in trajectories:
            values = {name: getattr(trajectory, name) for name in Trajectory.__dataclass_fields__}
            plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}
            file.write(json.dumps(plain) + "\n")
    _fsync(path)


def _fsync(path: Path) -> None:
    """File and directory: a new file is durable when both are."""
    for target in (path, path.parent):
        descriptor = os.open(target, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _random_reads(shard: Path, seed: int) -> float:
    """Whole trajectories per second, rows in random order; the shard is open (its digest was compared) before."""
    cache = ShardCache(shard.parent)
    if cache.bad_among([shard.name]):
        raise RuntimeError("the shard that was just written is damaged")
    rows = [random.Random(seed).randrange(_ROWS) for _ in range(_READS)]
    started = time.perf_counter()
    for row in rows:
        cache.read(shard.name, row)
    return _READS / (time.perf_counter() - started)
