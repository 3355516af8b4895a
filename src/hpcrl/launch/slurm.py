"""The few Slurm commands that hpcrl gives, as one class, so that tests can put an ordinary one in its place."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from hpcrl.errors import EnvironmentFault
from hpcrl.launch.environment import submission_environment
from hpcrl.launch.outcome import leader_of
from hpcrl.launch.preflight import require_commands

__all__ = ["Slurm"]

_ANSWER_S = 60.0
_SOON_S = 3.0
"""For a launcher that Slurm kills seconds later."""


class Slurm:
    """Slurm as the user reaches it. Commands see the user's variables, not those of a job that we are in; SLURM_CONF stays."""

    def submit(self, script: Path, *, folder: Path | None = None) -> str:
        """``sbatch SCRIPT`` from ``folder`` (default: the working directory); the leader's id. Raises EnvironmentFault."""
        require_commands("sbatch")
        done = self._run(["sbatch", "--parsable", str(script)], folder)
        if done.returncode != 0:
            raise EnvironmentFault(f"sbatch refused the job: {' '.join(done.stderr.split())}")
        return done.stdout.strip().split(";")[0]

    def states(self, job_ids: Iterable[str]) -> dict[str, str]:
        """Slurm's states by id; components as ``44+1``, a leader also as ``44``. Forgotten jobs are left out.

        squeue first: it needs no accounting, and knows a job until minutes after its end. Then sacct, which fails without
        accounting; that counts as an empty answer.
        """
        leaders = {leader_of(job_id) for job_id in job_ids}
        if not leaders:
            return {}
        found = self._listed(["squeue", "--noheader", "--me", "--states=all", "--format=%i|%T"], leaders)
        missing = leaders - {leader_of(job_id) for job_id in found}
        if missing:
            options = [
                "--noheader",
                "--parsable2",
                "--allocations",
                "--format=JobID,State",
                f"--jobs={','.join(missing)}",
            ]
            found |= self._listed(["sacct", *options], missing)
        return {**{leader_of(job_id): state for job_id, state in found.items() if job_id.endswith("+0")}, **found}

    def components(self, job_id: str) -> dict[str, tuple[str, str]]:
        """State and reason of each component by ``44+1``; empty when Slurm does not answer at once."""
        argv = ["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%i|%T|%r"]
        rows = [line.split("|") for line in self._run(argv, answer_s=_SOON_S).stdout.splitlines()]
        return {row[0]: (row[1], row[2]) for row in rows if len(row) == 3}

    def steps(self, job_id: str) -> list[str]:
        """Ids of the steps that run in any component, the batch script left out; empty when Slurm does not answer."""
        shown = self._run(["squeue", "--noheader", f"--jobs={job_id}", "--format=%A"])
        if not (components := ",".join(shown.stdout.split())):
            return []
        listed = self._run(["squeue", "--noheader", "--steps", f"--jobs={components}", "--format=%i"])
        return [step for step in listed.stdout.split() if step.rpartition(".")[2].isdecimal()]

    def cancel_steps(self, steps: list[str]) -> None:
        """``scancel`` of steps; those that are over already are no error."""
        self._run(["scancel", *steps])

    def cancel(self, job_id: str) -> None:
        """``scancel``; a job that is over already is no error. Raises EnvironmentFault when Slurm does not answer."""
        done = self._run(["scancel", job_id])
        if done.returncode != 0 and "Invalid job id" not in done.stderr:
            raise EnvironmentFault(f"scancel {job_id}: {' '.join(done.stderr.split())}")

    def requeue(self, job_id: str) -> None:
        """``scontrol requeue``, by the leader's id: all components start again. Raises EnvironmentFault with Slurm's reason."""
        done = self._run(["scontrol", "requeue", job_id])
        if done.returncode != 0:
            raise EnvironmentFault(
                f"Slurm does not requeue job {job_id}: {' '.join(done.stderr.split())}; "
                "the job may be submitted with --no-requeue, or the site may have set JobRequeue=0"
            )

    def output(self, job_id: str) -> Path | None:
        """Where the job's own output goes, in Slurm's word; None when it has forgotten the job."""
        told = re.search(r"^\s*StdOut=(.+)$", self._run(["scontrol", "show", "job", job_id]).stdout, re.MULTILINE)
        return Path(told[1]) if told else None

    def _listed(self, argv: list[str], leaders: set[str]) -> dict[str, str]:
        done = self._run(argv)
        rows = (line.split("|", 1) for line in done.stdout.splitlines() if "|" in line)
        return {job_id: state for job_id, state in rows if leader_of(job_id) in leaders}

    def _run(
        self, argv: list[str], folder: Path | None = None, answer_s: float = _ANSWER_S
    ) -> subprocess.CompletedProcess[str]:
        """A command that is missing or does not answer counts as one that failed."""
        env = submission_environment(os.environ)
        try:
            return subprocess.run(
                argv, cwd=folder, env=env, capture_output=True, text=True, timeout=answer_s, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return subprocess.CompletedProcess(argv, 127, "", str(error))
