from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.errors import UserError
from hpcrl.report import collect, summarize, write_report
from hpcrl.report.collect import percentile, stages


def test_summary_of_a_finished_run(run_dir: Path) -> None:
    summary = write_report(run_dir)
    assert summary == json.loads((run_dir / "summary.json").read_text())
    expected = {
        "run_id": "quick-1",
        "state": "success",
        "seed": 7,
        "steps": 3,
        "success_before": 0.3,
        "success_after": 0.9,
        "trajectories_trained": 96,
        "duplicates": 0,
        "max_lag": 2,
        "versions_published": 3,
        "publish_s_p50": 0.3,
        "flip_pause_s_p50": 0.02,
        "wall_s": 754.0,
        "tokens_trained": 6000,  # the repeated step counts once
        "tokens_generated": 300 + 200 + 40,  # a replica's counter began again at 0
        "digests_equal": True,
        "pool_hits": 3,
        "pool_misses": 1,
        "failures": {"infra:sandbox_start": 2},
        "policy_failures": {"sandbox_dead": 1},
        "rejected_reports": {"lease_expired": 1},
    }
    assert {name: summary[name] for name in expected} == expected
    assert summary["attempts"]["consumed"] == 96
    assert summary["logprob_gap_max_lag0"] == pytest.approx(6e-6)


def test_a_differing_digest_is_told(run_dir: Path) -> None:
    data = collect(run_dir)
    assert data.status is not None
    data.status.versions[1]["digests"] = {"r0": "bb", "r1": "xx"}
    assert summarize(data)["digests_equal"] is False


def test_an_unfinished_run_has_a_summary_too(run_dir: Path) -> None:
    for name in ("status.final.json", "end.json"):
        (run_dir / name).unlink()
    summary = summarize(collect(run_dir))
    assert summary["steps"] == 3 and summary["trajectories_trained"] == 96
    assert summary["success_before"] is None and summary["digests_equal"] is None
    assert summary["failures"] == {"infra:sandbox_start": 2}


def test_a_run_that_never_began(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    summary = summarize(collect(tmp_path))
    assert summary["steps"] is None and summary["wall_s"] is None and summary["tokens_generated"] == 0


def test_not_a_run_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run directory"):
        collect(tmp_path)


def test_a_damaged_status_is_named(run_dir: Path) -> None:
    (run_dir / "status.final.json").write_text("{")
    with pytest.raises(UserError, match=r"status\.final\.json"):
        collect(run_dir)


def test_only_one_evaluation_is_no_after(run_dir: Path) -> None:
    data = collect(run_dir)
    assert data.status is not None
    del data.status.eval[0]
    summary = summarize(data)
    assert (summary["success_before"], summary["success_after"]) == (0.3, None)


def test_stages_show_what_was_measured(run_dir: Path) -> None:
    measured = {stage.label: stage for stage in stages(collect(run_dir))}
    assert measured["sandbox start"].count == 1 and measured["sandbox start"].p50 == 0.05
    assert measured["trainer: training"].total == 6.0
    assert "scoring" not in measured


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 2), (0.51, 3), (0.9, 4), (1.0, 4)])
def test_percentile(share: float, expected: float) -> None:
    assert percentile([4, 2, 1, 3], share) == expected


def test_percentile_of_nothing() -> None:
    assert percentile([], 0.5) is None
