"""Callables as one heterogeneous job of a real Slurm without accounting."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import cloudpickle
import pytest
from hetjobs import Jobs
from submitit.core.utils import UncompletedJobError
from submitit.helpers import Checkpointable

from hpcrl.launch import Component, HetExecutor, HetJob, Outcome

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

START_S = 120.0

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # tasks do not find the tests


@pytest.fixture
def executor(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> HetExecutor:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
        monkeypatch.delenv(name)
    for name, value in jobs.cluster.env().items():
        monkeypatch.setenv(name, value)
    return HetExecutor(jobs.folder / "het", max_num_timeout=0)


def rank(offset: int) -> tuple[str, int]:
    print(f"rank of {offset}", flush=True)
    return socket.gethostname(), offset + int(os.environ["SLURM_PROCID"])


def until_running(job: HetJob) -> None:
    deadline = time.monotonic() + START_S
    while not all(component.stdout() for component in job.components):
        assert time.monotonic() < deadline, job.outcome()
        time.sleep(0.5)


def sleep() -> None:
    print("here", flush=True)
    time.sleep(600)


def pair(second: Component) -> list[Component]:
    return [Component(sleep, partition="train", timeout_min=10, additional_parameters={"no-requeue": True}), second]


def test_results_of_every_task_of_every_component(executor: HetExecutor) -> None:
    job = executor.submit_het(
        [
            Component(rank, (10,), tasks_per_node=2, gpus_per_node=1, partition="train"),
            Component(rank, kwargs={"offset": 20}, nodes=2, slurm_partition="cpu"),
            Component(rank, (30,), partition="infer", cpus_per_task=2),
        ]
    )
    assert job.wait(START_S) is Outcome.SUCCESS
    assert job.components[0].results() == [("train1", 10), ("train1", 11)]
    assert job.components[1].results() == [("cpu1", 20), ("cpu2", 21)]
    assert job.components[2].result() == ("infer1", 30)
    assert "rank of 30" in (job.components[2].stdout() or "")
    assert [component.state for component in job.components] == ["COMPLETED"] * 3


def test_a_callable_that_raises_fails_its_component(executor: HetExecutor) -> None:
    job = executor.submit_het([Component(int, ("x",), partition="train"), Component(rank, (1,), partition="cpu")])
    assert job.wait(START_S) is Outcome.FAILURE
    with pytest.raises(Exception, match="invalid literal for int"):
        job.components[0].result()
    assert job.components[1].result() == ("cpu1", 1)


def test_cancelled(executor: HetExecutor) -> None:
    job = executor.submit_het(pair(Component(sleep, partition="cpu", timeout_min=10)))
    until_running(job)
    job.cancel()
    assert job.wait(START_S) is Outcome.CANCELLED
    with pytest.raises(UncompletedJobError):
        job.components[1].result()


def test_a_node_that_dies(executor: HetExecutor, jobs: Jobs) -> None:
    job = executor.submit_het(pair(Component(sleep, partition="cpu", timeout_min=10)))
    until_running(job)
    jobs.cluster.node("cpu1").halt()
    jobs.slurm("scontrol", "update", "nodename=cpu1", "state=down", "reason=power")
    assert job.wait(START_S) is Outcome.NODE_FAILURE


class Counts(Checkpointable):  # type: ignore[misc]
    """Says how often it was started; hangs the first time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self) -> int:
        with open(self.path, "a") as file:
            file.write("x")
        starts = len(self.path.read_text())
        if starts == 1:
            time.sleep(600)
        return starts


def test_the_signal_requeues_the_whole_job_once(executor: HetExecutor, jobs: Jobs) -> None:
    paths = [jobs.folder / "first", jobs.folder / "second"]
    job = executor.submit_het(
        [
            Component(Counts(path), partition=partition, timeout_min=30)  # submitit: near its end in the last ten
            for path, partition in zip(paths, ("train", "cpu"), strict=True)
        ]
    )
    deadline = time.monotonic() + START_S
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, job.outcome()
        time.sleep(0.5)
    time.sleep(2)
    jobs.slurm("scancel", f"--signal={signal.SIGUSR2.name[3:]}", job.job_id)
    while job.outcome() is not Outcome.PENDING:
        assert time.monotonic() < deadline, job.outcome()
        time.sleep(0.5)
    jobs.slurm("scontrol", "update", f"jobid={job.job_id}", "StartTime=now")
    assert job.wait(START_S) is Outcome.SUCCESS
    assert [component.result() for component in job.components] == [2, 2]
