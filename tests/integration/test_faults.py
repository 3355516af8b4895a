"""What Slurm does to a running job: each fault once, on real het jobs with a stand-in engine. At random: tools/chaos --domains all."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.bench.life_jobs import SMALLEST, LifeCluster, LifeJob
from hpcrl.trajectory.reader import ShardReader

pytestmark = [pytest.mark.slurm, pytest.mark.apptainer, pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(900)]

_LONG_0, _LONG_1, _LONG_2 = (pytest.param(component, marks=pytest.mark.long) for component in range(3))

GONE_S = 10.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[LifeCluster]:
    folder = Path(tempfile.mkdtemp(prefix="hpcrl-faults-", dir="/var/tmp"))
    folder.chmod(0o711)  # run by root, sandboxes are another user's
    found = LifeCluster("hpcrl-faults", folder)
    try:
        found.up()
        yield found
    finally:
        found.cluster.down()
        shutil.rmtree(folder)


def training(cluster: LifeCluster, steps: int, *sets: str, sbatch: tuple[str, ...] = ()) -> LifeJob:
    cluster.up()
    job = cluster.submit(steps, *sets, stand_in=True, sbatch=(*sbatch, *SMALLEST))
    job.until(lambda: job.steps() >= 2, "second step")
    return job


def ends_well(job: LifeJob, steps: int) -> None:
    job.until(job.over, "end", dies=True)
    assert job.end()["state"] == "success", job.text()
    summary = json.loads(job.run.summary.read_text())
    assert (summary["steps"], summary["duplicates"]) == (steps, 0)
    assert summary["trajectories_trained"] == steps * 2 * 4
    assert "(continued)" in job.text()
    assert job.cluster.left(job.run) == []


def test_a_time_limit_that_is_really_reached_requeues_once_and_the_run_goes_on(cluster: LifeCluster) -> None:
    job = training(cluster, 90, sbatch=("--time=2", "--signal=B:USR1@30"))
    job.until(lambda: job.state() == "PENDING", "requeue", timeout_s=200, dies=True)
    assert job.end()["state"] == "timeout"
    assert any(job.run.checkpoints.glob("[!.]*"))
    cluster.slurm("scontrol", "update", f"jobid={job.job_id}", "TimeLimit=60")
    job.soon_again()
    ends_well(job, 90)
    assert job.text().count("back into the queue") == 1
    assert "first trained step" in job.text()
    trainer = [json.loads(line) for path in job.run.metrics.glob("trainer*.jsonl") for line in path.open()]
    assert len([entry for entry in trainer if "restart_s" in entry]) == 1


@pytest.mark.long
def test_a_time_limit_without_a_signal_before_it_requeues_from_the_newest_checkpoint(cluster: LifeCluster) -> None:
    job = training(cluster, 120, sbatch=("--time=1", "--signal=B:CONT@1"))
    job.until(lambda: job.state() == "PENDING", "requeue", timeout_s=200, dies=True)
    assert job.end()["state"] == "timeout"
    cluster.slurm("scontrol", "update", f"jobid={job.job_id}", "TimeLimit=60")
    job.soon_again()
    ends_well(job, 120)


@pytest.mark.long
def test_a_second_time_limit_ends_the_run(cluster: LifeCluster) -> None:
    job = training(cluster, 1000)
    cluster.slurm("scancel", "--batch", "--signal=USR1", job.job_id)
    job.soon_again()
    job.more_steps()
    cluster.slurm("scancel", "--batch", "--signal=USR1", job.job_id)
    job.until(job.over, "end", dies=True)
    assert job.end()["state"] == "timeout"
    assert job.state() == "FAILED"
    assert job.text().count("back into the queue") == 1


@pytest.mark.parametrize("component", [_LONG_0, 1, _LONG_2])
def test_a_preempted_job_comes_back(cluster: LifeCluster, component: int) -> None:
    job = training(cluster, 20)
    options = ["--partition=urgent", f"--nodelist={job.nodes()[component]}", "--exclusive", "--output=/dev/null"]
    cluster.slurm("sbatch", *options, "--wrap=sleep 3")
    job.soon_again()
    ends_well(job, 20)


@pytest.mark.long
def test_scontrol_requeue(cluster: LifeCluster) -> None:
    job = training(cluster, 20)
    cluster.slurm("scontrol", "requeue", job.job_id)
    job.soon_again()
    ends_well(job, 20)


@pytest.mark.parametrize("component", [_LONG_0, _LONG_1, 2])
def test_a_lost_node_puts_the_job_back_into_the_queue(cluster: LifeCluster, component: int) -> None:
    job = training(cluster, 30)
    node = job.nodes()[component]
    cluster.cluster.node(node).halt()
    job.soon_again(180)
    ends_well(job, 30)
    if component:
        assert "back into the queue" in job.text() or "NODE FAILURE" in job.text()


@pytest.mark.parametrize("component", [1, _LONG_2])
def test_scancel_of_one_component_ends_the_run_and_nothing_is_left(cluster: LifeCluster, component: int) -> None:
    job = training(cluster, 1000)
    cluster.slurm("scancel", f"{job.job_id}+{component}")
    gone_within(job, GONE_S)
    end = job.end()
    name = ("trainer", "inference", "sandbox")[component]
    assert (end["state"], end["reason"]) == (
        "cancelled",
        f"component {component} ({name}) of job {job.job_id} was cancelled",
    )


def test_scancel_of_all_leaves_nothing(cluster: LifeCluster) -> None:
    job = training(cluster, 1000)
    cluster.slurm("scancel", job.job_id)
    gone_within(job, GONE_S)
    assert job.end()["state"] == "cancelled"
    for shard in job.run.shards.glob("*.h5"):
        assert list(ShardReader(shard))


def test_a_crash_loop_ends_with_its_first_cause(cluster: LifeCluster) -> None:
    job = training(cluster, 1000, "run.restarts=2", "trainer.checkpoint_every=1000")
    for _ in range(3):
        before = job.text().count("starting mpi again")
        job.kill("hpcrl.run.trainer" if before == 0 else "hpcrl.run.inference")
        job.until(
            lambda before=before: job.over() or job.text().count("starting mpi again") > before, "restart", dies=True
        )  # type: ignore[misc]
        if not job.over():
            job.more_steps()
    job.until(job.over, "end", dies=True)
    reason = job.end()["reason"]
    assert reason.startswith("mpi ended with exit code 137: srun: error: train")
    assert "restarted 2 times without progress; at last: mpi ended" in reason


def gone_within(job: LifeJob, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (left := job.cluster.left(job.run)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left == [], job.text()
    job.until(job.over, "end", dies=True)
