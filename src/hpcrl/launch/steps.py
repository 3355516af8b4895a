"""The commands of a run, as pure functions: role → argument list, for Slurm and for one machine.

Under Slurm the trainer and inference groups are ONE step with one MPI world (``srun A : B``), ranks in that order; workers and
scorers are steps of the sandbox component. Locally the same roles run under mpiexec and as plain processes.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

from hpcrl.config import RunConfig
from hpcrl.launch.environment import HetGroup, HetJob
from hpcrl.protocol.rundir import RunDir

__all__ = [
    "PMI2_ENVIRONMENT",
    "Step",
    "coordinator_step",
    "local_steps",
    "sentinels",
    "slurm_steps",
    "task_epilogs",
    "visibility_check",
]


@dataclass(frozen=True, slots=True)
class Step:
    """One child of the launcher. ``ends_run`` marks the step whose success is the run's success.

    ``folders`` must exist before it starts (srun does not make the folder of its tasks' output). ``roles`` run in it.
    """

    name: str
    argv: list[str]
    log: Path
    ends_run: bool = False
    folders: tuple[Path, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    roles: tuple[str, ...] = ()


def _python(module: str, run: RunDir, *args: str, mpi: bool = False) -> list[str]:
    # `-m mpi4py` turns an exception of one rank into an abort of the whole world.
    return [sys.executable, *(["-m", "mpi4py"] if mpi else []), "-m", module, "--run-dir", str(run.root), *args]


PMI2_ENVIRONMENT = {
    # Slurm's pmi2 tells MPICH which ranks share a node from sorted node names, but numbers ranks in het group order: where the two
    # differ, MPI_Init hangs. MPICH then must not look for shared memory. Seen with Slurm 22.05.8.
    "MPIR_CVAR_NOLOCAL": "1",
    # pmi2 falls over when its tree of nodes gets a second level in a heterogeneous step.
    "SLURM_PMI2_TREE_WIDTH": "65533",
}


def _threads(count: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(count), "OPENBLAS_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count)}


def coordinator_step(run: RunDir, host: str, resume: bool = False) -> Step:
    """The coordinator, on the batch host; ``resume`` opens a run again that was finished."""
    argv = _python("hpcrl.run.coordinator", run, "--host", host, *(["--resume"] if resume else []))
    return Step(
        "coordinator", argv, run.logs("coordinator") / "coordinator.log", env=_threads(1), roles=("coordinator",)
    )


def slurm_steps(run: RunDir, config: RunConfig, job: HetJob) -> list[Step]:
    """The combined MPI step; for each sandbox node one step of its workers and one of its scorers, which are restarted alone."""
    trainer, inference, sandbox = job.groups
    common = ["--kill-on-bad-exit=1", "--export=ALL", "--unbuffered", *config.slurm.srun_args]

    def cpus(group: HetGroup) -> list[str]:
        # srun has not inherited it from the job since Slurm 22.05.
        return [] if group.cpus_per_task is None else [f"--cpus-per-task={group.cpus_per_task}"]

    def part(index: int, role: str, tasks: int, command: list[str], *extra: str, log: str = "%t.log") -> list[str]:
        return [
            f"--het-group={index}",
            f"--ntasks={tasks}",
            f"--output={run.logs(role) / log}",
            "--open-mode=append",
            *extra,
            *common,
            *command,
        ]

    mpi, epilog = f"--mpi={config.slurm.mpi}", f"--task-epilog={_epilog(run, 'inference')}"
    combined = [
        "srun",
        *part(0, "trainer", trainer.tasks, _python("hpcrl.run.trainer", run, mpi=True), mpi, *cpus(trainer)),
        ":",
        *part(
            1,
            "inference",
            inference.tasks,
            _python("hpcrl.run.inference", run, mpi=True),
            mpi,
            *cpus(inference),
            epilog,
        ),
    ]
    folders = (run.logs("trainer"), run.logs("inference"))
    env = {**(PMI2_ENVIRONMENT if config.slurm.mpi == "pmi2" else {}), **config.slurm.env}
    steps = [Step("mpi", combined, run.logs("launcher") / "mpi.log", True, folders, env, _WORLD)]
    for role, per_node in (("worker", config.worker.per_node), ("scorer", config.scoring.per_node)):
        command = _python(f"hpcrl.run.{role}", run)
        for node in range(sandbox.nodes):
            options = [
                "--mpi=none",
                "--nodes=1",
                f"--relative={node}",
                f"--ntasks-per-node={per_node}",
                f"--task-epilog={_epilog(run, role)}",
            ]
            # Workers and scorers share all CPUs of the node.
            argv = [
                "srun",
                "--overlap",
                "--cpu-bind=none",
                *part(2, role, per_node, command, *options, log=f"{node}-%t.log"),
            ]
            env = {**_threads(1), **config.slurm.env}
            log = run.logs("launcher") / f"{role}-{node}.log"
            steps.append(Step(f"{role}-{node}", argv, log, folders=(run.logs(role),), env=env, roles=(role,)))
    return steps


_WORLD = ("trainer", "inference")


def sentinels(run: RunDir, config: RunConfig, job: HetJob) -> list[Step]:
    """A step for each component but the batch host's that does nothing on all its nodes, until Slurm ends the component."""
    return [
        Step(
            f"sentinel-{group.index}",
            [
                "srun",
                f"--het-group={group.index}",
                "--ntasks-per-node=1",
                "--mpi=none",
                "--overlap",
                "--cpu-bind=none",
                "--kill-on-bad-exit=1",
                *config.slurm.srun_args,
                "sleep",
                "infinity",
            ],
            run.logs("launcher") / f"sentinel-{group.index}.log",
        )
        for group in job.groups[1:]
    ]


def answer_check(config: RunConfig) -> list[str]:
    """A step on every node of the job that does nothing: it fails, or hangs, where a node is gone."""
    options = ["--het-group=0,1,2", "--ntasks-per-node=1", "--mpi=none", "--overlap", *config.slurm.srun_args]
    return ["srun", *options, "true"]


def visibility_check(run: RunDir, config: RunConfig) -> list[str]:
    """A short step on every node of the job that fails, naming the node, where the run directory cannot be read."""
    script = f'test -r "$1" || {{ echo "$(hostname)"; exit {NOT_SHARED}; }}'
    return [
        "srun",
        "--het-group=0,1,2",
        "--ntasks-per-node=1",
        "--mpi=none",
        "--overlap",
        *config.slurm.srun_args,
        "sh",
        "-c",
        script,
        "sh",
        str(run.config),
    ]


NOT_SHARED = 9


def sandbox_check(run: RunDir, config: RunConfig) -> list[str]:
    """A step on every sandbox node that starts one sandbox; the reason of a failure is recorded as a role's is."""
    options = [
        "--het-group=2",
        "--ntasks-per-node=1",
        "--mpi=none",
        "--overlap",
        f"--task-epilog={_epilog(run, 'worker')}",
    ]
    return ["srun", *options, *config.slurm.srun_args, *sandbox_check_here(run)]


def memory_sweep(run: RunDir, config: RunConfig) -> list[str]:
    """A step on every inference node that removes the run's weight copies from shared memory: srun kills ranks without a last word."""
    srun = ["srun", "--het-group=1", "--ntasks-per-node=1", "--mpi=none", "--overlap", *config.slurm.srun_args]
    return [*srun, "sh", "-c", 'rm -f /dev/shm/hpcrl-"$1"-*.weights', "sh", run.run_id]


def task_epilogs(run: RunDir) -> dict[Path, str]:
    """Scripts that Slurm runs on a rank's or worker's node after it has ended, however it ended: SIGKILL leaves no last word.

    After inference ranks: the run's weight copies are removed from the node's shared memory. Ranks end together (a step with one bad
    exit is ended), so that nobody on the node needs them any more. After workers, scorers and the sandbox check: what dead ones left
    of sandboxes.
    A step that is being ended sends SIGTERM to its epilogs too; they go on, and what kills them first is left to `memory_sweep`, if the
    launcher lives, and to the next rank or worker on the node.
    """
    mine = f"/dev/shm/hpcrl-{shlex.quote(run.run_id)}"
    weights = f"rm -rf {mine}-*.weights {mine}-*.adapters"
    sandboxes = shlex.join([sys.executable, "-m", "hpcrl.sandbox.sweep"])
    texts = {"inference": weights, "worker": f"exec {sandboxes}", "scorer": f"exec {sandboxes}"}
    return {_epilog(run, role): f"#!/bin/sh\ntrap '' TERM\n{text}\n" for role, text in texts.items()}


def _epilog(run: RunDir, role: str) -> Path:
    return run.logs(role) / "task-epilog.sh"


def sandbox_check_here(run: RunDir) -> list[str]:
    """The same on this machine."""
    return _python("hpcrl.run.check", run)


def local_steps(run: RunDir, config: RunConfig, mpiexec: str = "mpiexec") -> list[Step]:
    """The same roles on this machine: mpiexec and subprocesses."""
    combined = [
        mpiexec,
        "-n",
        str(config.trainer.ranks),
        *_python("hpcrl.run.trainer", run, mpi=True),
        ":",
        "-n",
        str(config.inference.replicas),
        *_python("hpcrl.run.inference", run, mpi=True),
    ]
    steps = [Step("mpi", combined, run.logs("launcher") / "mpi.log", ends_run=True, env=config.slurm.env, roles=_WORLD)]
    for role, count in (("worker", config.worker.per_node), ("scorer", config.scoring.per_node)):
        for index in range(count):
            argv = _python(f"hpcrl.run.{role}", run, "--index", str(index))
            steps.append(Step(f"{role}-{index}", argv, run.logs(role) / f"{index}.log", env=_threads(1), roles=(role,)))
    return steps
