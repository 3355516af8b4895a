"""Shards: what is sealed reads back exactly; what is not sealed, damaged or inconsistent is refused by name."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.errors import DataError, UserError
from hpcrl.trajectory import ShardCache, ShardReader, ShardWriter, Trajectory
from hpcrl.trajectory.names import QUARANTINE, quarantine


def make(index: int = 0, tokens: int = 12, **changes: Any) -> Trajectory:
    rng = np.random.default_rng(index)
    mask = np.zeros(tokens, np.uint8)
    mask[tokens // 2 :] = 1
    fields: dict[str, Any] = {
        "run_id": "run",
        "task_id": "täsk",
        "group_id": f"g{index // 4:06d}",
        "rollout_id": f"g{index // 4:06d}-r{index % 4}",
        "attempt_id": f"g{index // 4:06d}-r{index % 4}-a0",
        "split": "train",
        "policy_version": "0.3",
        "environment_version": "sha256:e",
        "verifier_version": "sha256:v",
        "token_ids": rng.integers(0, 259, tokens, dtype=np.int32),
        "logprobs": np.where(mask, -rng.random(tokens), 0).astype(np.float32),
        "loss_mask": mask,
        "segments": np.array([0], np.int32),
        "spans": np.array([[tokens // 2, tokens, 0, 3]], np.int32),
        "reward": float(index % 2),
        "first_token_at": 1700000000.25 + index,
        "rewards": {"reward": float(index % 2)},
        "timings": {"model": 0.5},
        "requests": [{"request_id": f"q{index}"}],
        "messages": [{"role": "user", "content": "naïve \ud800 text"}],
    }
    return Trajectory(**(fields | changes))


def same(left: Trajectory, right: Trajectory) -> None:
    for field in dataclasses.fields(Trajectory):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        elif isinstance(a, (list, tuple)):
            assert list(a) == list(b)
        else:
            assert a == b, field.name


@given(sizes=st.lists(st.integers(4, 40), min_size=1, max_size=12))
@settings(max_examples=20, deadline=None)
def test_sealed_rows_read_back_exactly(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    folder = tmp_path_factory.mktemp("shards")
    writer = ShardWriter(folder, "cpu1-0")
    written = [make(index, tokens) for index, tokens in enumerate(sizes)]
    assert [writer.append(trajectory) for trajectory in written] == list(range(len(sizes)))
    path, rows = writer.seal()
    assert rows == len(sizes)
    for left, right in zip(written, ShardReader(path), strict=True):
        same(left, right)
    assert [file.name for file in folder.iterdir()] == [path.name]


def test_each_seal_begins_a_new_shard_and_names_are_never_reused(tmp_path: Path) -> None:
    names = []
    for _ in range(2):
        with ShardWriter(tmp_path, "w") as writer:
            for index in range(2):
                writer.append(make(index))
                names.append(writer.seal()[0].name)
    assert len(set(names)) == 4
    with pytest.raises(UserError, match="without rows"):
        ShardWriter(tmp_path, "w").seal()


def test_cache_returns_rows_in_the_order_asked(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "shards", "w")
    refs = []
    for index in range(6):
        row = writer.append(make(index))
        if index % 2:
            path, _ = writer.seal()
            refs += [(f"shards/{path.name}", row - 1), (f"shards/{path.name}", row)]
    order = [5, 0, 3, 1, 4, 2]
    got = ShardCache(tmp_path, keep=1).read_many([refs[i] for i in order])
    assert [trajectory.requests[0]["request_id"] for trajectory in got] == [f"q{i}" for i in order]


def test_killed_writer_leaves_nothing_readable(tmp_path: Path) -> None:
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path; from test_shards import make; from hpcrl.trajectory import ShardWriter\n"
        "w = ShardWriter(Path(sys.argv[1]), 'w')\n"
        "w.append(make(0)); w.seal(); w.append(make(1)); print('open', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    sealed, partial = sorted(tmp_path.iterdir())
    assert partial.name == "w-00001.h5.partial"
    assert len(ShardReader(sealed)) == 1
    with pytest.raises(DataError, match="not a sealed shard"):
        ShardReader(tmp_path / "w-00001.h5.partial")
    writer = ShardWriter(tmp_path, "w")
    writer.append(make(2))
    assert writer.seal()[0].name.startswith("w-00002.")


@pytest.mark.parametrize("place", [0.0, 0.4, 0.9])
def test_one_altered_byte_is_found_before_anything_is_read(tmp_path: Path, place: float) -> None:
    writer = ShardWriter(tmp_path, "w")
    writer.append(make(0, 500))
    path, _ = writer.seal()
    with open(path, "r+b") as file:
        file.seek(int(path.stat().st_size * place))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    bad = ShardCache(tmp_path).bad_among([path.name])
    assert list(bad) == [path.name]
    assert "truncated or altered" in bad[path.name]


def test_a_quarantined_shard_is_kept_and_out_of_the_way(tmp_path: Path) -> None:
    for content in ("first", "second"):
        (tmp_path / "w-00000.h5").write_text(content)
        quarantine(tmp_path / "w-00000.h5")
    quarantine(tmp_path / "w-00000.h5")  # another rank was faster
    assert not list(tmp_path.glob("*.h5"))
    assert sorted(path.read_text() for path in (tmp_path / QUARANTINE).iterdir()) == ["first", "second"]


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 0.999])
def test_truncated_shard_is_named(tmp_path: Path, keep: float) -> None:
    writer = ShardWriter(tmp_path, "w")
    for index in range(20):
        writer.append(make(index, 50))
    path, _ = writer.seal()
    os.truncate(path, int(path.stat().st_size * keep))
    with pytest.raises(DataError, match=rf"bad_shard: .*{path.name}: .*truncated or altered"):
        ShardCache(tmp_path).read(path.name, 0)


def test_inconsistent_offsets_missing_row_and_missing_file_are_named(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "w")
    writer.append(make(0))
    path, _ = writer.seal()
    with pytest.raises(DataError, match=r"has 1 rows, row 1"):
        ShardCache(tmp_path).read(path.name, 1)
    path = path.rename(tmp_path / "w-00000.h5")  # without a digest in its name, the content must speak for itself
    with h5py.File(path, "r+") as file:
        file["token_offsets"][1] = 11
    with pytest.raises(DataError, match=r"w-00000\.h5: token_offsets does not fit"):
        ShardReader(path)
    with pytest.raises(DataError, match="does not exist"):
        ShardCache(tmp_path, patience_s=0).read("gone.h5", 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs": np.zeros(11, np.float32)}, "length_mismatch"),
        ({"logprobs": np.full(12, np.nan, np.float32)}, "logprob_not_finite"),
        ({"logprobs": np.full(12, 0.5, np.float32)}, "logprob_positive"),
        ({"token_ids": np.zeros(12, np.int64)}, "bad_array"),
        ({"loss_mask": np.full(12, 2, np.uint8)}, "bad_mask"),
        ({"segments": np.array([0, 5, 5], np.int32)}, "bad_segments"),
        ({"segments": np.array([1], np.int32)}, "bad_segments"),
        ({"segments": np.array([0, 7], np.int32)}, "bad_segments"),
        ({"spans": np.array([[7, 12, 0, 3]], np.int32)}, "no_version"),
        ({"spans": np.array([[6, 13, 0, 3]], np.int32)}, "bad_spans"),
        ({"spans": np.array([[6, 9, 0, 3], [8, 12, 0, 4]], np.int32)}, "bad_spans"),
        ({"reward": float("nan")}, "reward_not_finite"),
        ({"rewards": {"style": float("inf")}}, "reward_not_finite"),
    ],
)
def test_bad_records_are_refused_before_they_are_written(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    writer = ShardWriter(tmp_path, "w")
    with pytest.raises(DataError) as caught:
        writer.append(make(0, **changes))
    assert caught.value.reason == reason
    assert "g000000-r0-a0" in str(caught.value)
    assert writer.rows == 0


def test_versions_are_those_of_trained_tokens() -> None:
    spans = np.array([[2, 4, 0, 1], [6, 9, 0, 2], [9, 12, 1, 2]], np.int32)
    trajectory = make(0, spans=spans)
    assert str(trajectory.oldest_version) == "0.2"
    assert str(trajectory.newest_version) == "1.2"
    untrained = make(0, spans=spans, loss_mask=np.zeros(12, np.uint8))
    assert str(untrained.oldest_version) == "0.3"
