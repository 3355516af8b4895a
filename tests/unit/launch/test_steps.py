"""The commands of a run as text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.config import RunConfig, parse_config
from hpcrl.launch import steps as plan
from hpcrl.launch.environment import HetGroup, HetJob
from hpcrl.launch.steps import Step
from hpcrl.protocol.rundir import RunDir

RUN = RunDir(Path("/shared/runs/r"))
JOB = HetJob("44", (HetGroup(0, 2, 16), HetGroup(1, 4, 4), HetGroup(2, 8, 8)))


def config(**sections: object) -> RunConfig:
    return parse_config({"model": {"path": "m"}, "tasks": {"train": "t"}, **sections})


def by_name(steps: list[Step]) -> dict[str, Step]:
    assert len({step.name for step in steps}) == len(steps)
    return {step.name: step for step in steps}


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    colon = argv.index(":")
    return argv[:colon], argv[colon + 1 :]


def test_trainer_and_inference_are_one_step_in_this_order() -> None:
    mpi = by_name(plan.slurm_steps(RUN, config(), JOB))["mpi"]
    trainer, inference = split(mpi.argv)
    assert trainer[0] == "srun"
    assert {"--het-group=0", "--ntasks=16", "--mpi=pmi2", "--kill-on-bad-exit=1"} <= set(trainer)
    assert {"--het-group=1", "--ntasks=4", "--mpi=pmi2", "--kill-on-bad-exit=1"} <= set(inference)
    tail = ["-m", "mpi4py", "-m", "hpcrl.run.trainer", "--run-dir", "/shared/runs/r"]
    assert trainer[-7:] == [sys.executable, *tail]
    assert inference[-7:] == [sys.executable, *[part.replace("trainer", "inference") for part in tail]]


def test_only_the_mpi_step_ends_the_run() -> None:
    for steps in (plan.slurm_steps(RUN, config(), JOB), plan.local_steps(RUN, config())):
        assert [step.name for step in steps if step.ends_run] == ["mpi"]


def test_options_stand_before_the_command_in_every_step() -> None:
    steps = plan.slurm_steps(RUN, config(slurm={"srun_args": ["--constraint=x"]}), JOB)
    for argv in [part for step in steps for part in (split(step.argv) if ":" in step.argv else (step.argv,))]:
        command = argv.index(sys.executable)
        assert "--constraint=x" in argv[:command]
        assert not [part for part in argv[command + 1 :] if part.startswith("--") and part != "--run-dir"]


@pytest.mark.parametrize(("role", "section"), [("worker", "worker"), ("scorer", "scoring")])
def test_workers_and_scorers_run_on_every_sandbox_node_without_mpi(role: str, section: str) -> None:
    found = by_name(plan.slurm_steps(RUN, config(**{section: {"per_node": 3}}), JOB))
    steps = [found[f"{role}-{node}"] for node in range(8)]
    assert not [name for name in found if name.startswith(role) and found[name] not in steps]
    assert [f"--relative={node}" in step.argv for node, step in enumerate(steps)] == [True] * 8
    assert len({part for step in steps for part in step.argv if part.startswith("--output")}) == 8
    step = steps[0]
    assert {"--het-group=2", "--nodes=1", "--ntasks=3", "--ntasks-per-node=3", "--mpi=none", "--overlap"} <= set(
        step.argv
    )
    assert step.argv[-4:] == ["-m", f"hpcrl.run.{role}", "--run-dir", "/shared/runs/r"]
    assert "mpi4py" not in step.argv
    assert step.env["OMP_NUM_THREADS"] == "1"


def test_every_folder_of_task_output_is_made_before_its_step() -> None:
    """srun drops the output of its tasks when the folder is missing."""
    for step in plan.slurm_steps(RUN, config(), JOB):
        outputs = {Path(part.removeprefix("--output=")).parent for part in step.argv if part.startswith("--output=")}
        assert outputs
        assert outputs <= set(step.folders)


def test_pmi2_needs_help_from_the_environment_and_others_do_not() -> None:
    with_pmi2 = by_name(plan.slurm_steps(RUN, config(), JOB))["mpi"].env
    assert with_pmi2["MPIR_CVAR_NOLOCAL"] == "1"
    assert int(with_pmi2["SLURM_PMI2_TREE_WIDTH"]) > 1000
    assert by_name(plan.slurm_steps(RUN, config(slurm={"mpi": "pmix"}), JOB))["mpi"].env == {}


def test_the_configurations_environment_reaches_every_role_and_wins() -> None:
    chosen = {"UCX_TLS": "tcp", "OMP_NUM_THREADS": "3", "MPIR_CVAR_NOLOCAL": "0"}
    for step in plan.slurm_steps(RUN, config(slurm={"env": chosen}), JOB):
        assert chosen.items() <= step.env.items()


def test_checks_run_once_per_node() -> None:
    seen = plan.visibility_check(RUN, config(slurm={"srun_args": ["--constraint=x"]}))
    assert {"--het-group=0,1,2", "--ntasks-per-node=1", "--mpi=none", "--constraint=x"} <= set(seen)
    assert seen[-1] == "/shared/runs/r/config.resolved.yaml"
    sandbox = plan.sandbox_check(RUN, config())
    assert {"--het-group=2", "--ntasks-per-node=1", "--mpi=none"} <= set(sandbox)
    assert "--task-epilog=/shared/runs/r/logs/worker/task-epilog.sh" in sandbox
    assert sandbox[-4:] == plan.sandbox_check_here(RUN)[-4:] == ["-m", "hpcrl.run.check", "--run-dir", "/shared/runs/r"]


def test_a_sweep_removes_this_runs_weights_only() -> None:
    argv = plan.memory_sweep(RUN, config())
    assert "--het-group=1" in argv
    assert argv[-3:] == ['rm -f /dev/shm/hpcrl-"$1"-*.weights', "sh", "r"]


def test_the_end_of_an_inference_rank_removes_this_runs_weights_only(tmp_path: Path) -> None:
    mine, other = RunDir(tmp_path / "my run's"), RunDir(tmp_path / "my")
    names = [f"hpcrl-{run.run_id}-replica{index}" for run in (mine, other) for index in ("0-0.weights", "1.adapters")]
    for name in names:
        (tmp_path / name).touch()
    [script] = [text for path, text in plan.task_epilogs(mine).items() if path.parent.name == "inference"]
    subprocess.run(["sh", "-c", script.replace("/dev/shm/", f"{tmp_path}/")], check=True)
    assert [name for name in names if (tmp_path / name).exists()] == names[2:]


def test_every_epilog_is_written_before_it_is_named() -> None:
    steps = plan.slurm_steps(RUN, config(), JOB)
    trainer, inference = split(by_name(steps)["mpi"].argv)
    others = [step.argv for step in steps if step.name != "mpi"]
    named = [part.removeprefix("--task-epilog=") for argv in (inference, *others) for part in argv if "epilog" in part]
    assert list(dict.fromkeys(named)) == [str(path) for path in plan.task_epilogs(RUN)]
    assert not [part for part in trainer if "epilog" in part]


def test_the_coordinator_listens_on_the_given_address() -> None:
    step = plan.coordinator_step(RUN, "10.0.0.1")
    assert step.argv[-2:] == ["--host", "10.0.0.1"]
    assert "--resume" in plan.coordinator_step(RUN, "10.0.0.1", resume=True).argv


def test_the_local_roles() -> None:
    steps = by_name(
        plan.local_steps(
            RUN,
            config(
                trainer={"ranks": 3},
                inference={"replicas": 2},
                worker={"per_node": 2},
                slurm={"env": {"UCX_TLS": "tcp"}},
            ),
            "/opt/mpi/mpiexec",
        )
    )
    assert set(steps) == {"mpi", "worker-0", "worker-1", "scorer-0"}
    trainer, inference = split(steps["mpi"].argv)
    assert trainer[:3] == ["/opt/mpi/mpiexec", "-n", "3"]
    assert inference[:2] == ["-n", "2"]
    assert steps["worker-1"].argv[-2:] == ["--index", "1"]
    assert len({step.log for step in steps.values()}) == 4


def test_no_port_is_fixed() -> None:
    """Two runs on one node must not meet."""
    everything = [
        *plan.slurm_steps(RUN, config(), JOB),
        *plan.local_steps(RUN, config()),
        plan.coordinator_step(RUN, "h"),
    ]
    assert not [part for step in everything for part in step.argv if "--port" in part]


def test_each_part_of_the_mpi_step_gets_its_jobs_cpus_per_task() -> None:
    groups = (HetGroup(0, 1, 2, 3), HetGroup(1, 2, 2, 5), HetGroup(2, 2, 2))
    steps = by_name(plan.slurm_steps(RUN, config(), HetJob("1", groups)))
    first, second = split(steps["mpi"].argv)
    assert "--cpus-per-task=3" in first and "--cpus-per-task=5" in second
    assert "--cpu-bind=none" in steps["worker-0"].argv


def test_a_sentinel_waits_on_every_node_of_the_components_that_the_batch_script_does_not_run_in() -> None:
    found = by_name(plan.sentinels(RUN, config(slurm={"srun_args": ["--constraint=x"]}), JOB))
    assert list(found) == ["sentinel-1", "sentinel-2"]
    for index, step in enumerate(found.values(), 1):
        assert step.argv[:2] == ["srun", f"--het-group={index}"]
        assert {"--ntasks-per-node=1", "--overlap", "--mpi=none", "--constraint=x"} <= set(step.argv)
        assert step.argv[-2:] == ["sleep", "infinity"]
        assert not step.ends_run
