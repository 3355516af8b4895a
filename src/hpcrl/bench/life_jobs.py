"""Small real runs on a development cluster, for whoever breaks them: submit, wait, look for processes, kill.

    LifeCluster      a cluster with a second, more urgent partition on every node
    LifeJob          one run as one heterogeneous job: its id, its run directory, what it printed

The quickstart's configuration and model with few steps. With ``stand_in`` the engines are `hpcrl.bench.stand_in`: everything else is
what a run is, and a start takes seconds instead of most of a minute.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.bench.stand_in import FOLDER
from hpcrl.devcluster import Cluster, ClusterLayout, NodeGroup
from hpcrl.devcluster.procs import snapshot
from hpcrl.errors import RunError
from hpcrl.launch.environment import clean_environment
from hpcrl.protocol.rundir import RunDir

__all__ = ["SMALLEST", "LifeCluster", "LifeJob", "layout", "processes_of"]

_CONFIG = "configs/quickstart.yaml"
_SCRIPT = "slurm/launch_hetjob.sh"
SMALLEST = ("--ntasks-per-node=1", ":", "--nodes=1", ":", "--nodes=1")
_OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", ""}
_POLL_S = 0.1
_SETS = (
    "tasks.eval=null",
    "trainer.groups_per_step=2",
    "trainer.checkpoint_every=1",
    "rollout.group_size=4",
    "inference.request_timeout_s=400",
    "coordinator.lease_s=10",
    "coordinator.heartbeat_s=1",
    "coordinator.infra_retries=10000",
    "coordinator.data_retries=10000",
    "coordinator.redraws=10000",
    "rollout.attempt_timeout_s=30",
)
"""Leases are short, so that what a dead worker held is soon tried again, and nothing is given up for having failed too often."""
_TASKS = 5
_VERIFIER_S = 5.0


def layout(name: str) -> ClusterLayout:
    """Two nodes of each kind: a run has one of each, and a spare one when it loses that. ``urgent`` pushes others off any node."""
    return ClusterLayout(
        name=name,
        nodes=(
            NodeGroup(prefix="train", count=2, partition="train", cpus=8, gpus=2),
            NodeGroup(prefix="infer", count=2, partition="infer", cpus=8, gpus=2),
            NodeGroup(prefix="cpu", count=2, partition="cpu", cpus=8),
        ),
        slurm_conf={
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
            "PartitionName": "urgent Nodes=ALL PriorityTier=10 MaxTime=INFINITE State=UP",
            "SlurmdTimeout": 20,
        },
    )


class LifeCluster:
    """``folder``: where run directories lie; every node must see it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.cluster = Cluster(name)
        self.folder = folder
        self._layout = layout(name)
        self._count = 0

    def up(self) -> None:
        """Start it, or repair what was broken."""
        self.cluster.up(self._layout)

    def slurm(self, *argv: str) -> str:
        """Output of a Slurm command. Raises RunError when it fails."""
        env = {**clean_environment(os.environ), **self.cluster.env()}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode != 0:
            raise RunError(f"{' '.join(argv)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def submit(self, steps: int, *sets: str, stand_in: bool, sbatch: tuple[str, ...] = SMALLEST) -> LifeJob:
        """One run of ``steps`` training steps; ``sets`` are KEY=VALUE."""
        self._count += 1
        root = self.folder / f"run{self._count}"
        given = [*_SETS, f"trainer.steps={steps}", f"run.dir={self.folder}", *sets]
        if stand_in:
            given += [f"slurm.env={json.dumps({'PYTHONPATH': str(FOLDER)})}", f"tasks.train={self._tasks()}"]
            given.append(f"scoring.lease_s={60 + _VERIFIER_S:g}")
        output = self.folder / f"job{self._count}.out"
        arguments = [_CONFIG, "--run-dir", str(root), *(part for item in given for part in ("--set", item))]
        return self._submit(RunDir(root), output, sbatch, arguments)

    def resume(self, job: LifeJob) -> LifeJob:
        """Another job that continues the run of one that is over."""
        return self._submit(job.run, job.output, SMALLEST, ["--resume", str(job.run.root)])

    def _submit(self, run: RunDir, output: Path, sbatch: tuple[str, ...], arguments: list[str]) -> LifeJob:
        job_id = self.slurm("sbatch", "--parsable", f"--output={output}", *sbatch, _SCRIPT, *arguments)
        return LifeJob(self, job_id.split(";")[0], run, output)

    def _tasks(self) -> Path:
        """Tasks that the stand-in solves every other time; a dead scorer holds its attempts a minute longer than their checks take."""
        root = self.folder / "tasks"
        for name in (f"task-{index}" for index in range(0 if root.exists() else _TASKS)):
            files = {
                "task.toml": f'version = "1.0"\n[verifier]\ntimeout_sec = {_VERIFIER_S}\n',
                "instruction.md": f"Make the answer right ({name}).\n",
                "environment/files/answer": "wrong\n",
                "tests/test.sh": "grep -c right answer > /logs/verifier/reward.txt\n",
            }
            for path, text in files.items():
                (root / name / path).parent.mkdir(parents=True, exist_ok=True)
                (root / name / path).write_text(text, encoding="utf-8")
        return root

    def left(self, run: RunDir) -> list[str]:
        """What a run that is over still has on any node that is up: processes, weights in shared memory, sandboxes."""
        found = [f"process {pid}: {argv[:80]}" for pid, argv in processes_of(run)]
        look = f"ls -d /dev/shm/hpcrl-{run.run_id}-* /tmp/hpcrl-*/w-* 2>/dev/null; true"
        for node in self.cluster.status().nodes:
            if self.cluster.node(node.name).init() is None:
                continue
            line, env = self.cluster.command(["sh", "-c", look], node=node.name)
            done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=60, check=False)
            found += [f"{node.name}: {path}" for path in done.stdout.split()]
        return found


@dataclass
class LifeJob:
    """A submitted run."""

    cluster: LifeCluster
    job_id: str
    run: RunDir
    output: Path

    def state(self) -> str:
        """Slurm's word for the leader; "" when Slurm has forgotten it."""
        return self._states().get(f"{self.job_id}+0", "")

    def _states(self) -> dict[str, str]:
        """By component, ``44+1``."""
        shown = self.cluster.slurm("squeue", "-h", "--states=all", "-j", self.job_id, "-o", "%i %T")
        return dict(line.split(" ") for line in shown.splitlines())

    def over(self) -> bool:
        return self.state() in _OVER

    def steps(self) -> int:
        """Training steps so far, repeated ones included."""
        log = self.run.logs("trainer") / "0.log"
        return log.read_text(errors="replace").count("hpcrl.trainer.loop: step ") if log.exists() else 0

    def text(self) -> str:
        """What the job printed."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def end(self) -> dict[str, Any]:
        """The run's end record; empty while there is none."""
        with suppress(OSError):
            return dict(json.loads(self.run.end.read_text()))
        return {}

    def until(self, condition: Callable[[], bool], what: str, *, timeout_s: float = 300.0, dies: bool = False) -> float:
        """Wait; seconds it took. Raises RunError when the job ends before (unless it may: ``dies``), or time is over."""
        started = asked = time.monotonic()
        while not condition():
            now = time.monotonic()
            if not dies and now - asked > 1.0:
                asked = now
                if self.over() and not condition():
                    raise RunError(f"no {what}: job {self.job_id} ended ({self.state()}); {self.tail()}")
            if now - started > timeout_s:
                raise RunError(f"no {what} in {timeout_s:.0f} s: job {self.job_id} is {self.state()}; {self.tail()}")
            time.sleep(_POLL_S)
        return time.monotonic() - started

    def more_steps(self, count: int = 1, **options: Any) -> float:
        """Wait for ``count`` steps more than now."""
        goal = self.steps() + count
        return self.until(lambda: self.steps() >= goal, f"step {goal}", **options)

    def soon_again(self, timeout_s: float = 120.0, after_s: int = 0) -> None:
        """A requeued job waits for two minutes (its credential's life); here for ``after_s``."""
        self.until(lambda: set(self._states().values()) == {"PENDING"}, "requeue", timeout_s=timeout_s, dies=True)
        with suppress(RunError):  # it started meanwhile
            self.cluster.slurm("scontrol", "update", f"jobid={self.job_id}", f"StartTime=now+{after_s}")

    def nodes(self) -> dict[int, str]:
        """Component → its (first) node."""
        shown = self.cluster.slurm("squeue", "-h", "-j", self.job_id, "-o", "%i %N")
        rows = (line.split(" ") for line in shown.splitlines())
        return {int(job_id.rpartition("+")[2]): node.split(",")[0] for job_id, node in rows}

    def kill(self, *marks: str) -> int:
        """SIGKILL to the first process whose command line has all ``marks`` (its srun is spared); its pid."""
        for pid, argv in processes_of(self.run):
            if all(mark in argv for mark in marks) and not argv.startswith("srun "):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    return pid
        raise RunError(f"nothing runs with {' '.join(marks)}")

    def kill_engine(self) -> int:
        """The same to an engine, whose command line does not name the run: a descendant of an inference rank, below its guard."""
        ranks = {pid for pid, argv in processes_of(self.run) if "-m hpcrl.run.inference" in argv}
        below = {proc.pid: proc.ppid for proc in snapshot()}
        for pid in below:
            argv = _argv(pid)
            if (
                "vllm.entrypoints" in argv
                and "hpcrl.inference.guard" not in argv
                and ranks & set(_ancestors(pid, below))
            ):
                os.kill(pid, signal.SIGKILL)
                return pid
        raise RunError("no engine runs")

    def tail(self) -> str:
        """For an error message."""
        return " | ".join(self.text().strip().splitlines()[-6:])


def processes_of(run: RunDir) -> list[tuple[int, str]]:
    """Processes on this machine whose command line names the run directory."""
    found = []
    for proc in snapshot():
        argv = _argv(proc.pid)
        if f"{run.root} " in argv or f"{run.root}/" in argv:
            found.append((proc.pid, argv))
    return found


def _argv(pid: int) -> str:
    """Empty for a process that has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _ancestors(pid: int, parents: dict[int, int]) -> list[int]:
    found = []
    while (pid := parents.get(pid, 0)) > 1:
        found.append(pid)
    return found
