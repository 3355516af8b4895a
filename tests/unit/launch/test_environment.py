"""The job as Slurm tells it to the batch script. ``environments/`` holds what Slurm 22.05 really exported."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.errors import EnvironmentFault
from hpcrl.launch.environment import HetGroup, HetJob, clean_environment


def captured(name: str) -> dict[str, str]:
    text = (Path(__file__).parent / "environments" / f"{name}.env").read_text()
    return dict(line.split("=", 1) for line in text.splitlines())


def test_the_shipped_script() -> None:
    job = HetJob.from_env(captured("default"))
    assert job == HetJob("1", (HetGroup(0, 1, 2, 1), HetGroup(1, 2, 2, 2), HetGroup(2, 2, 2, 4)))


def test_sizes_overridden_on_the_command_line() -> None:
    """``sbatch --nodes=1 : --nodes=1 --ntasks-per-node=2 … : --nodes=2 --ntasks-per-node=2 SCRIPT``."""
    job = HetJob.from_env(captured("overridden"))
    assert job.groups == (HetGroup(0, 1, 2, 1), HetGroup(1, 1, 2, 2), HetGroup(2, 2, 4, 4))


@pytest.mark.parametrize("name", ["SLURM_NTASKS_HET_GROUP_1", "SLURM_NTASKS_PER_NODE_HET_GROUP_1"])
def test_tasks_are_found_without_one_of_their_names(name: str) -> None:
    """A component given by --nodes alone exports neither of them."""
    env = captured("default")
    del env[name]
    assert HetJob.from_env(env).groups[1] == HetGroup(1, 2, 2, 2)


def test_tasks_per_node_as_slurm_abbreviates_it() -> None:
    env = {key: value for key, value in captured("default").items() if not key.startswith("SLURM_NTASKS")}
    env["SLURM_TASKS_PER_NODE_HET_GROUP_1"] = "3(x2)"
    assert HetJob.from_env(env).groups[1] == HetGroup(1, 2, 6, 2)


@pytest.mark.parametrize(("count", "restarted"), [(None, False), ("0", False), ("2", True)])
def test_a_job_that_was_requeued_knows_it(count: str | None, restarted: bool) -> None:
    env = captured("default") | ({} if count is None else {"SLURM_RESTART_COUNT": count})
    assert HetJob.from_env(env).restarted is restarted


def test_outside_a_job() -> None:
    with pytest.raises(EnvironmentFault, match=r"must run inside a Slurm job: sbatch slurm/launch_hetjob\.sh CONFIG"):
        HetJob.from_env({"PATH": "/bin"})


def test_a_job_without_components() -> None:
    with pytest.raises(
        EnvironmentFault, match=r"the job has 1 component\(s\), but needs 3 \(trainer, inference, sandbox\)"
    ):
        HetJob.from_env(captured("no-components"))


@pytest.mark.parametrize("size", ["2", "4"])
def test_a_job_with_other_components(size: str) -> None:
    with pytest.raises(EnvironmentFault, match=rf"the job has {size} component\(s\), but needs 3"):
        HetJob.from_env({**captured("default"), "SLURM_HET_SIZE": size})


def test_a_submission_from_within_a_job_leaks_nothing() -> None:
    env = {
        **captured("default"),
        "SLURM_CONF": "/etc/slurm/other.conf",
        "SBATCH_PARTITION": "x",
        "SRUN_DEBUG": "1",
        "PMI_RANK": "0",
        "PMIX_RANK": "0",
        "OMPI_COMM_WORLD_RANK": "0",
        "HYDRA_BOOTSTRAP": "x",
        "PATH": "/bin",
        "HPCRL_CACHE": "/cache",
    }
    env.pop("SLURMD_NODENAME", None)
    kept = {"SLURM_CONF": "/etc/slurm/other.conf", "PATH": "/bin", "HPCRL_CACHE": "/cache"}
    assert clean_environment(env) == kept
    assert "SLURM_CONF" not in clean_environment({"PATH": "/bin"})
