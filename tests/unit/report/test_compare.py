"""Several runs in one picture and table."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hpcrl.errors import UserError
from hpcrl.report.compare import _cell, compare_svg, compare_table


def _run(root: Path, rewards: list[float]) -> Path:
    (root / "metrics").mkdir(parents=True)
    lines = [{"t": 1.0 + step, "step": step, "reward_mean": reward} for step, reward in enumerate(rewards, start=1)]
    (root / "metrics" / "trainer-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def test_the_curve_of_a_set_is_the_mean_over_its_runs(tmp_path: Path) -> None:
    one, two = _run(tmp_path / "one", [0.0, 1.0]), _run(tmp_path / "two", [0.0, 0.0])
    both = ElementTree.fromstring(compare_svg({"real": [one, two]}))
    alone = ElementTree.fromstring(compare_svg({"real": [_run(tmp_path / "mean", [0.0, 0.5])]}))
    tag = "{http://www.w3.org/2000/svg}polyline"
    assert [line.get("points") for line in both.iter(tag)] == [line.get("points") for line in alone.iter(tag)]
    assert len(list(both.iter(tag))) == 1


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to draw"):
        compare_svg({"real": [_run(tmp_path / "empty", [])]})


def test_the_table_has_a_row_per_run(tmp_path: Path) -> None:
    table = compare_table({"real": [_run(tmp_path / "a", [0.5])], "control": [_run(tmp_path / "b", [0.5])]})
    assert [row.split(" | ")[0] for row in table.splitlines()[2:]] == ["| real", "| control"]


@pytest.mark.parametrize(
    ("value", "text"), [(1103.4, "1103"), (0.9479, "0.948"), (4.05e-6, "4.1e-06"), (None, "–"), (2, "2")]
)
def test_table_cells_are_short(value: float | None, text: str) -> None:
    assert _cell(value) == text
