"""``hpcrl run --launcher slurm`` on a real Slurm: followed through the time limit's requeue to the end and the summary."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hetjobs import ROOT, Jobs
from test_hetjob import CONFIG, HPCRL, START_S, read, scaled_down

from hpcrl.protocol.rundir import RunDir

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.vllm,
    pytest.mark.apptainer,
    pytest.mark.mpi,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(2400),
]


def until(condition: Callable[[], bool], process: subprocess.Popen[str], output: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.5)


def test_a_requeued_job_is_followed_to_its_real_end(jobs: Jobs) -> None:
    run, said = RunDir(jobs.folder / "run"), jobs.folder / "said"
    sets = [part for item in scaled_down(jobs.folder, "trainer.steps=3", "tasks.eval=null") for part in ("--set", item)]
    argv = [str(HPCRL), "run", CONFIG, "--launcher", "slurm", "--run-dir", str(run.root), *sets]
    env = {**jobs.env, "SBATCH_OUTPUT": f"{jobs.folder}/slurm-%j.out"}
    with (
        open(said, "w") as out,
        subprocess.Popen(argv, env=env, cwd=ROOT, stdout=out, stderr=out, text=True) as process,
    ):
        try:
            until(lambda: len(list(run.manifests.glob("*"))) > 1, process, said, START_S)
            job = re.search(r"submitted job (\d+)", said.read_text())
            assert job is not None
            jobs.slurm("scancel", "--batch", "--signal=USR1", job[1])
            until(lambda: "waiting for Slurm to end the job" in said.read_text(), process, said, 300)

            def waits() -> bool:
                return "PENDING" in jobs.slurm("squeue", "-h", "--states=all", "-j", job[1], "-o", "%T")

            until(waits, process, said, 300)
            jobs.slurm("scontrol", "update", f"jobid={job[1]}", "StartTime=now")
            assert process.wait(START_S) == 0, said.read_text()
        finally:
            process.terminate()
            if (job := re.search(r"submitted job (\d+)", said.read_text())) is not None:
                subprocess.run(["scancel", job[1]], env=jobs.env, check=False, timeout=60)
    assert read(run.summary)["state"] == "success"
    assert read(run.summary)["steps"] == 3
    assert f"summary: {run.summary}" in said.read_text()
