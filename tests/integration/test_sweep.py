"""docs/sweep.py as it stands: three runs through submit_run and a real sbatch, waited for, and their metrics read."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hetjobs import FULL_STACK, ROOT, Jobs
from test_hetjob import read

pytestmark = [*FULL_STACK, pytest.mark.long, pytest.mark.timeout(2400)]


def test_three_runs_from_python(jobs: Jobs) -> None:
    runs = jobs.folder / "runs"
    env = {**jobs.env, "SBATCH_OUTPUT": f"{jobs.folder}/slurm-%j.out"}
    argv = [sys.executable, "docs/sweep.py", str(runs)]
    done = subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, timeout=2300, check=False)
    said = "\n".join([done.stdout, done.stderr, *(path.read_text() for path in jobs.folder.glob("slurm-*.out"))])
    assert done.returncode == 0, said
    ends = [line for line in done.stdout.splitlines() if "success, 4 steps, " in line]
    assert [line.split(":")[0] for line in ends] == ["lr 5e-05", "lr 0.00015", "lr 0.0003"], said
    summaries = [read(path) for path in runs.glob("lr*/summary.json")]
    assert [(summary["state"], summary["steps"]) for summary in summaries] == [("success", 4)] * 3
    assert [int(line.rsplit(" ", 1)[1]) > 0 for line in ends] == [True] * 3
