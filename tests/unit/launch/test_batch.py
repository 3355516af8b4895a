"""The batch script's entry point: which run is this job's own, and when that is forgotten."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from hpcrl.errors import RunError
from hpcrl.launch import batch


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    config = tmp_path / "c.yaml"
    config.write_text(
        yaml.safe_dump({"model": {"path": "m"}, "tasks": {"train": "t"}, "run": {"dir": str(tmp_path / "runs")}})
    )
    monkeypatch.setattr(sys, "argv", ["launch_hetjob.sh", str(config)])
    monkeypatch.setenv("SLURM_JOB_ID", "44")
    return tmp_path / "runs"


def test_the_note_of_a_jobs_run_goes_when_it_has_succeeded(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(batch, "launch_slurm", lambda *_, resume: seen.append((runs / ".job-44").exists()))
    batch.main()
    assert seen == [True]
    assert not list(runs.iterdir())


def test_it_stays_as_long_as_slurm_may_start_the_job_again(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, resume: bool) -> None:
        raise RunError("node lost")

    monkeypatch.setattr(batch, "launch_slurm", fails)
    with pytest.raises(SystemExit):
        batch.main()
    assert (runs / ".job-44").exists()
