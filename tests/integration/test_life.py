"""What a run survives: the shipped script, scaled down, on a real Slurm, and somebody who kills its parts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from hetjobs import FULL_STACK, Job, Jobs
from test_hetjob import CONFIG, SMALLEST, START_S, _processes_of, check_every_trained_trajectory, read, scaled_down

from hpcrl.protocol.rundir import RunDir

pytestmark = [*FULL_STACK, pytest.mark.timeout(2400)]


def kill(run: RunDir, module: str) -> int:
    """SIGKILL to the role's own process (not its srun); the process."""
    victim = next(pid for pid, argv in _processes_of(run) if module in argv and "srun" not in argv)
    os.kill(victim, signal.SIGKILL)
    return victim


def again(run: RunDir, module: str, before: int) -> Callable[[], bool]:
    return lambda: any(module in argv and "srun" not in argv and pid != before for pid, argv in _processes_of(run))


def one(job: Job, run: RunDir, module: str) -> None:
    victim = kill(run, module)
    started = time.monotonic()
    job.wait_for(again(run, module, victim), 120, f"{module} again")
    print(f"{module} again after {time.monotonic() - started:.1f} s")


def test_a_run_survives_the_death_of_each_of_its_parts(jobs: Jobs) -> None:
    sets = scaled_down(jobs.folder, "trainer.steps=4", "trainer.checkpoint_every=1", "tasks.eval=null")
    job = jobs.submit(CONFIG, *sets, sbatch=SMALLEST)
    run = RunDir(job.run_dir)
    job.wait_for(lambda: any(run.checkpoints.glob("[!.]*")), START_S, "checkpoint")
    for module in ("hpcrl.run.worker", "hpcrl.run.scorer", "hpcrl.run.coordinator", "hpcrl.run.inference"):
        one(job, run, module)
    assert job.wait(START_S) == "COMPLETED", job.evidence()
    summary = read(run.summary)
    assert summary["state"] == "success"
    assert summary["steps"] == 4
    assert summary["duplicates"] == 0
    check_every_trained_trajectory(run, groups=8)
    assert _processes_of(run) == []


def test_near_the_time_limit_a_run_is_saved_requeued_once_and_goes_on(jobs: Jobs) -> None:
    job = jobs.submit(CONFIG, *scaled_down(jobs.folder, "trainer.steps=3", "tasks.eval=null"), sbatch=SMALLEST)
    run = RunDir(job.run_dir)
    job.wait_for(lambda: len(list(run.manifests.glob("*"))) > 1, START_S, "trained step")
    jobs.slurm("scancel", "--batch", "--signal=USR1", job.job_id)
    job.wait_for(lambda: job.state() == "PENDING", 300, "requeue")
    assert read(run.end)["state"] == "timeout"
    assert any(run.checkpoints.glob("[!.]*"))
    jobs.slurm("scontrol", "update", f"jobid={job.job_id}", "StartTime=now")
    assert job.wait(START_S) == "COMPLETED", job.evidence()
    summary = read(run.summary)
    assert summary["state"] == "success"
    assert summary["steps"] == 3
    assert summary["duplicates"] == 0
    assert "(continued)" in job.text()
    check_every_trained_trajectory(run, groups=6)
