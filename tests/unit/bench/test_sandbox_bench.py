from __future__ import annotations

import pytest
from typer.testing import CliRunner

from hpcrl.bench.sandbox import PARTS, TARGETS, markdown
from hpcrl.cli.main import app

AT_THE_BOUND: dict[str, float | None] = {key: bound for _, key, bound, _, _ in TARGETS}


def test_each_target_is_a_line_that_says_whether_it_was_reached() -> None:
    _, _, *lines = markdown(AT_THE_BOUND)
    assert len(lines) == len(TARGETS) and all(line.endswith("| yes |") for line in lines)
    assert lines[0] == "| start without pool / plain exec | ≤ 1.15 × | 1.15 × | yes |"


@pytest.mark.parametrize(
    ("key", "value"), [("start_ratio", 1.2), ("file_mb_s", 299.0), ("failures_64", 1.0), ("rss_growth", 0.5)]
)
def test_a_missed_target_is_no(key: str, value: float) -> None:
    missed = [line for line in markdown(AT_THE_BOUND | {key: value}) if line.endswith("| no |")]
    assert len(missed) == 1


def test_what_was_not_measured_is_a_dash() -> None:
    assert all(line.endswith("| – | – |") for line in markdown({})[2:])


def test_an_unknown_part_names_those_there_are() -> None:
    done = CliRunner().invoke(app, ["bench", "sandbox", "--only", "everything"])
    assert done.exit_code != 0 and all(part in done.output for part in PARTS)
