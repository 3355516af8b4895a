"""Exports hold what the shards hold; other suffixes are refused before anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hpcrl.errors import UserError
from hpcrl.trajectory import Trajectory
from hpcrl.trajectory.export import export_trajectories


def trajectory(index: int, spans: int) -> Trajectory:
    tokens = 4 + index
    mask = np.zeros(tokens, np.uint8)
    mask[2:] = spans > 0
    return Trajectory(
        run_id="r",
        task_id="täsk",
        group_id="g000000",
        rollout_id=f"g000000-r{index}",
        attempt_id=f"g000000-r{index}-a0",
        split="train",
        policy_version="0.3",
        environment_version="e",
        verifier_version="v",
        token_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        loss_mask=mask,
        segments=np.array([0], np.int32),
        spans=np.array([[2, tokens, 0, 3]] * spans, np.int32).reshape(-1, 4),
        reward=0.5 + index,
        first_token_at=1.5,
        messages=[{"role": "user", "content": "naïve"}],
    )


def source() -> list[tuple[Path, int, Trajectory]]:
    # The first one has no span: types must not be guessed from it.
    return [(Path("w-0.h5"), index, trajectory(index, spans=min(index, 1))) for index in range(300)]


def test_json_lines(tmp_path: Path) -> None:
    assert export_trajectories(source(), tmp_path / "out.jsonl") == 300
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert (lines[7]["shard"], lines[7]["row"], lines[7]["task_id"], lines[7]["reward"]) == ("w-0.h5", 7, "täsk", 7.5)
    assert lines[7]["token_ids"] == list(range(11)) and lines[7]["spans"] == [[2, 11, 0, 3]]
    assert lines[7]["messages"] == [{"role": "user", "content": "naïve"}]


def test_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert export_trajectories(source(), tmp_path / "out.parquet") == 300
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert len(rows) == 300 and rows[0]["span_start"] == []
    row = rows[299]
    assert (row["shard"], row["row"], row["reward"], row["policy_failure"]) == ("w-0.h5", 299, 299.5, None)
    assert row["token_ids"] == list(range(303)) and row["loss_mask"][2:] == [1] * 301
    assert (row["span_start"], row["span_end"], row["span_step"]) == ([2], [303], [3])
    assert json.loads(row["messages"]) == [{"role": "user", "content": "naïve"}]


def test_another_suffix_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"export writes \.jsonl or \.parquet"):
        export_trajectories(source(), tmp_path / "out.csv")
    assert list(tmp_path.iterdir()) == []
