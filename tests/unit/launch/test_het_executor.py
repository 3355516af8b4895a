"""One job of several callables: its script, its components, its end. Slurm is a fake; the local executor is real."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from submitit.core import utils

from hpcrl.errors import UserError
from hpcrl.launch import Component, HetExecutor, LocalHetExecutor, Outcome
from hpcrl.launch.het_environment import COMPONENT, HetSlurmJobEnvironment
from hpcrl.launch.slurm import Slurm

PAIR = [
    Component(max, (1, 2), nodes=2, tasks_per_node=2, gpus_per_node=4, partition="train", timeout_min=30),
    Component(str.upper, ("x",), nodes=1, slurm_partition="cpu", timeout_min=30, mem_gb=4),
]


@pytest.fixture
def slurm() -> FakeSlurm:
    return FakeSlurm()


@pytest.fixture
def executor(tmp_path: Path, slurm: FakeSlurm) -> HetExecutor:
    return HetExecutor(tmp_path / "a b", slurm=slurm)


def test_one_script_with_a_block_of_directives_for_each_component(executor: HetExecutor, slurm: FakeSlurm) -> None:
    job = executor.submit_het(PAIR)
    first, second = slurm.texts[0].split("#SBATCH hetjob\n")
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=2", "#SBATCH --gpus-per-node=4"} < set(first.splitlines())
    assert {"#SBATCH --partition=train", "#SBATCH --time=30"} < set(first.splitlines())
    assert {"#SBATCH --nodes=1", "#SBATCH --partition=cpu", "#SBATCH --mem=4GB"} < set(second.splitlines())
    assert "gpus" not in second.split("export SUBMITIT")[0]
    steps = re.findall(r"srun --het-group=(\d) .*--nodes=(\d) --ntasks=(\d)", slurm.texts[0])
    assert steps == [("0", "2", "4"), ("1", "1", "1")]
    assert job.job_id == "44"
    assert [component.job_id for component in job.components] == ["44+0", "44+1"]
    assert [component.num_tasks for component in job.components] == [4, 1]
    assert job.components[1].submission().result() == "X"


def test_the_executors_own_parameters_are_the_components_defaults(executor: HetExecutor, slurm: FakeSlurm) -> None:
    executor.update_parameters(partition="all", account="mine")
    executor.submit_het([Component(int), Component(int, partition="cpu")])
    first, second = slurm.texts[0].split("#SBATCH hetjob\n")
    assert "#SBATCH --partition=all" in first
    assert "#SBATCH --partition=cpu" in second
    assert "#SBATCH --account=mine" in first
    assert "#SBATCH --account=mine" in second


@pytest.mark.parametrize(
    ("states", "outcome"),
    [
        (("PENDING", "PENDING"), Outcome.PENDING),
        (("RUNNING", "COMPLETED"), Outcome.RUNNING),
        (("COMPLETED", "COMPLETED"), Outcome.SUCCESS),
        (("COMPLETED", "FAILED"), Outcome.FAILURE),
        (("CANCELLED by 1000", "CANCELLED+"), Outcome.CANCELLED),
        (("TIMEOUT", "CANCELLED"), Outcome.TIMEOUT),
        (("PREEMPTED", "CANCELLED"), Outcome.PREEMPTED),
        (("CANCELLED", "NODE_FAIL"), Outcome.NODE_FAILURE),
    ],
)
def test_how_a_job_ended(executor: HetExecutor, slurm: FakeSlurm, states: tuple[str, str], outcome: Outcome) -> None:
    job = executor.submit_het(PAIR)
    slurm.jobs = dict(zip(("44+0", "44+1"), states, strict=True))
    assert job.outcome() is outcome
    assert job.components[0].state == states[0]


def test_what_the_batch_script_noted_counts_once_slurm_has_forgotten(executor: HetExecutor, slurm: FakeSlurm) -> None:
    job = executor.submit_het(PAIR)
    slurm.jobs.clear()
    assert job.outcome() is Outcome.UNKNOWN
    for component, state in (("44+0", "COMPLETED"), ("44+1", "FAILED")):
        (executor.folder / f"{component}_end").write_text(state + "\n")
        job.components[0].watcher.clear()
    assert job.outcome() is Outcome.FAILURE


def test_waiting_has_an_end(executor: HetExecutor) -> None:
    job = executor.submit_het(PAIR)
    with pytest.raises(TimeoutError, match="job 44 is still pending after 0 s"):
        job.wait(0)


def test_results_come_from_the_tasks_files(executor: HetExecutor, slurm: FakeSlurm) -> None:
    job = executor.submit_het(PAIR)
    slurm.jobs["44+1"] = "COMPLETED"
    utils.cloudpickle_dump(("success", "X"), executor.folder / "44+1_0_result.pkl")
    (executor.folder / "44+1_0_log.out").write_text("hello\n")
    assert job.components[1].result() == "X"
    assert job.components[1].stdout() == "hello\n"


def test_cancelling_takes_the_leader_or_one_component(executor: HetExecutor, slurm: FakeSlurm) -> None:
    job = executor.submit_het(PAIR)
    job.components[1].cancel()
    job.cancel()
    assert slurm.calls == ["cancel 44+1", "cancel 44"]


def test_arrays_are_refused_with_what_to_do(executor: HetExecutor) -> None:
    with pytest.raises(UserError, match=r"no arrays of heterogeneous jobs; submit one job for each"):
        executor.map_array(int, ["1", "2"])
    with pytest.raises(UserError, match="component 0: Slurm has no arrays"):
        executor.submit_het([Component(int, additional_parameters={"array": "0-3"})])


def test_requeueing_is_the_whole_jobs_affair(executor: HetExecutor) -> None:
    with pytest.raises(UserError, match=r"component 1: requeue is set for the whole job; give it to component 0"):
        executor.submit_het([Component(int), Component(int, additional_parameters={"no_requeue": True})])


def test_an_unknown_parameter_is_named(executor: HetExecutor) -> None:
    with pytest.raises(UserError, match=r"component 0: .*gpus_per_nod"):
        executor.submit_het([Component(int, gpus_per_nod=1)])


@pytest.mark.parametrize("name", ["nodes", "tasks_per_node"])
@pytest.mark.parametrize("value", ["two", 0, -1])
def test_sizes_are_whole_numbers(executor: HetExecutor, name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"component 0: {name} is {value!r}; give a whole number"):
        executor.submit_het([Component(int, **{name: value})])


def test_a_dependency_belongs_to_the_whole_job(executor: HetExecutor, slurm: FakeSlurm) -> None:
    with pytest.raises(UserError, match="component 1: dependency is set for the whole job; give it to component 0"):
        executor.submit_het([Component(int), Component(int, dependency="afterok:3")])
    executor.submit_het([Component(int, dependency="afterok:3"), Component(int, dependency="afterok:3")])
    assert slurm.texts[0].count("--dependency=afterok:3") == 1


def test_what_is_no_component(executor: HetExecutor) -> None:
    with pytest.raises(UserError, match=r"3 cannot be called"):
        Component(3)  # type: ignore[arg-type]
    for wrong in ("abc", 3):
        with pytest.raises(UserError, match=r"give a tuple, of one argument too: \(x,\)"):
            Component(int, wrong)  # type: ignore[arg-type]
    for one in (Component(int), [int]):
        with pytest.raises(UserError, match="submit_het takes a list of Components"):
            executor.submit_het(one)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="needs at least one"):
        executor.submit_het([])


def test_what_cannot_be_pickled_is_not_submitted(executor: HetExecutor, slurm: FakeSlurm) -> None:
    with pytest.raises(UserError, match=r"component 1: function and arguments cannot be handed to the tasks: .*lock"):
        executor.submit_het([Component(int), Component(int, (threading.Lock(),))])
    assert not slurm.texts
    assert not list(executor.folder.iterdir())


def test_only_the_first_component_asks_for_the_requeue(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Slurm, "requeue", lambda self, job_id: asked.append(job_id))
    for component in ("44+1", "44+0"):
        monkeypatch.setenv(COMPONENT, component)
        HetSlurmJobEnvironment()._requeue(1)
    assert asked == ["44"]


def test_submitit_finds_the_environment_of_a_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from submitit.core.job_environment import JobEnvironment

    monkeypatch.setenv("SUBMITIT_EXECUTOR", "hetslurm")
    monkeypatch.setenv("SUBMITIT_FOLDER", str(tmp_path))
    monkeypatch.setenv(COMPONENT, "44+1")
    assert JobEnvironment().paths.result_pickle == tmp_path / "44+1_0_result.pkl"


def test_the_same_calls_on_this_machine(tmp_path: Path) -> None:
    job = LocalHetExecutor(tmp_path).submit_het(
        [Component(os.path.join, ("a", "b"), nodes=2), Component(int, ("no number",), partition="cpu")]
    )
    assert job.wait(60) is Outcome.FAILURE
    assert job.components[0].results() == ["a/b", "a/b"]
    with pytest.raises(utils.FailedJobError, match="invalid literal for int"):
        job.components[1].result()


def test_this_machine_refuses_what_slurm_would(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"component 0: .*gpus_per_nod"):
        LocalHetExecutor(tmp_path).submit_het([Component(int, gpus_per_nod=1)])
