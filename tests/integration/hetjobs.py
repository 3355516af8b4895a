"""Het jobs on a Slurm cluster that belongs to the tests: submit, wait, look at nodes, leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpcrl.devcluster import Cluster, ClusterLayout, NodeGroup
from hpcrl.launch.environment import clean_environment

ROOT = Path(__file__).parents[2]

LAYOUT = ClusterLayout(
    name="hpcrl-e2e",
    nodes=(
        NodeGroup(prefix="train", partition="train", cpus=32, gpus=8),
        NodeGroup(prefix="infer", count=2, partition="infer", cpus=32, gpus=8),
        NodeGroup(prefix="cpu", count=2, partition="cpu", cpus=32),
    ),
)
"""The shipped script's partitions, with room for several jobs at once."""

FULL_STACK = [pytest.mark.slurm, pytest.mark.vllm, pytest.mark.apptainer, pytest.mark.mpi, pytest.mark.slow]
"""Marks of a module that runs the shipped script with every real part."""

_OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


@dataclass
class Job:
    """A submitted job: its id, its run directory, where its output goes."""

    jobs: Jobs
    job_id: str
    run_dir: Path
    output: Path

    def state(self) -> str:
        """State of the leader, for example RUNNING."""
        return self.jobs.slurm("squeue", "-h", "--states=all", "-j", self.job_id, "-o", "%T").split("\n")[0]

    def over(self) -> bool:
        return self.state() in _OVER

    def wait(self, timeout_s: float) -> str:
        """Block until the job has ended; its final state."""
        self.wait_for(self.over, timeout_s, "end", fails_with_job=False)
        return self.state()

    def wait_for(
        self, condition: Callable[[], bool], timeout_s: float, what: str, *, fails_with_job: bool = True
    ) -> None:
        """Block until ``condition``; a job that ends first, or too much time, is an AssertionError with the job's output."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            ended = fails_with_job and self.over()
            if ended or time.monotonic() > deadline:
                why = "the job ended" if ended else f"{timeout_s:.0f} s passed"
                raise AssertionError(f"no {what}: {why}; {self.evidence()}")
            time.sleep(0.5)

    def evidence(self) -> str:
        """For a failed assertion: the job's output, who waits for whom, and the end of every log."""
        ends = []
        for log in sorted(self.run_dir.glob("logs/*/*.log")):
            lines = log.read_text(errors="replace").strip().splitlines()[-12:]
            ends.append(f"--- {log.relative_to(self.run_dir)}\n" + "\n".join(lines))
        argv = [str(Path(sys.executable).with_name("hpcrl")), "status", str(self.run_dir)]
        status = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        return "\n".join([f"job {self.job_id} printed:", self.text(), "--- status", status.stdout, *ends])

    def text(self) -> str:
        """What the job printed."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def last_line(self) -> str:
        return self.text().strip().splitlines()[-1]


class Jobs:
    """Submits to one cluster; ``cancel_all`` ends what a failed test left."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self._count = 0
        self._ids: list[str] = []

    @property
    def env(self) -> dict[str, str]:
        return {**clean_environment(os.environ), **self.cluster.env()}

    def slurm(self, *argv: str) -> str:
        """Output of a Slurm command, which must succeed."""
        done = subprocess.run(argv, env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, config: str, *sets: str, run_dir: Path | None = None, sbatch: tuple[str, ...] = ()) -> Job:
        """Submit slurm/launch_hetjob.sh with ``--set`` for each of ``sets``."""
        root, output = self._places(run_dir)
        args = [config, "--run-dir", str(root), *(part for item in sets for part in ("--set", item))]
        return self._submit(root, output, [*sbatch, "slurm/launch_hetjob.sh", *args])

    def wrap(self, command: str, *sbatch: str) -> Job:
        """Submit one command as an ordinary job. ``{run}`` in it is the run directory."""
        root, output = self._places(None)
        return self._submit(root, output, [*sbatch, f"--wrap={command.format(run=root)}"])

    def _places(self, run_dir: Path | None) -> tuple[Path, Path]:
        self._count += 1
        return run_dir or self.folder / f"run{self._count}", self.folder / f"job{self._count}.out"

    def _submit(self, root: Path, output: Path, argv: list[str]) -> Job:
        job_id = self.slurm("sbatch", "--parsable", f"--output={output}", *argv).split(";")[0]
        self._ids.append(job_id)
        return Job(self, job_id, root, output)

    def on_nodes(self, *argv: str) -> dict[str, str]:
        """Output of a command inside every node."""
        outputs = {}
        for node in self.cluster.status().nodes:
            line, env = self.cluster.command(list(argv), node=node.name)
            done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=60, check=False)
            outputs[node.name] = done.stdout
        return outputs

    def cancel_all(self) -> None:
        """Cancel everything that was submitted and wait until it is gone."""
        if not self._ids:
            return
        subprocess.run(["scancel", *self._ids], env=self.env, capture_output=True, timeout=60, check=False)
        deadline = time.monotonic() + 60.0
        while self.slurm("squeue", "-h", "-o", "%i") and time.monotonic() < deadline:
            time.sleep(0.5)
        self._ids.clear()
