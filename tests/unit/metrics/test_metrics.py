"""Metric names are checked; lines survive a killed writer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.errors import UserError
from hpcrl.metrics import METRICS, MetricsWriter, read_metrics


def test_every_name_is_listed_once_under_its_own_key() -> None:
    assert all(name == entry.name and entry.unit and entry.text for name, entry in METRICS.items())


def test_lines_read_back(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, "trainer", 0) as writer:
        writer.write({"reward_mean": 0.5, "lag_histogram": {"0": 3}, "loss": float("nan")}, step=2)
        writer.write({"queue_s": 0.1})
    first, second = read_metrics(tmp_path / "metrics" / "trainer-0.jsonl")
    assert (first["step"], first["reward_mean"], first["lag_histogram"], first["loss"]) == (2, 0.5, {"0": 3}, None)
    assert "step" not in second


def test_unknown_name_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, "trainer", 0) as writer:
        with pytest.raises(UserError, match="did you mean reward_mean"):
            writer.write({"reward_men": 1.0})
        assert writer.path.read_text() == ""


def test_a_killed_writers_half_line_costs_only_itself(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, "worker", 1) as writer:
        writer.write({"turns": 2})
    with open(writer.path, "a") as file:
        file.write('{"t": 1, "tu')
    with MetricsWriter(tmp_path, "worker", 1) as writer:
        writer.write({"turns": 3})
    assert [line["turns"] for line in read_metrics(writer.path)] == [2, 3]


def test_tensorboard_files_appear(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, "trainer", 0, tensorboard=True) as writer:
        writer.write({"reward_mean": 0.5, "lag_histogram": {"0": 3}}, step=1)
    assert any((tmp_path / "metrics" / "tensorboard").glob("events*"))
    assert json.loads(writer.path.read_text())["reward_mean"] == 0.5
