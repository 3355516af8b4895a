"""Submit slurm/launch_hetjob.sh with sbatch, and ask what became of the job."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from hpcrl.errors import EnvironmentFault
from hpcrl.launch.environment import submission_environment
from hpcrl.launch.preflight import require_commands

__all__ = ["job_output", "job_states", "submit"]

SCRIPT = Path("slurm/launch_hetjob.sh")


def submit(script_args: list[str]) -> str:
    """Submit from the project's root (the working directory); the job id. Raises EnvironmentFault with Slurm's own words."""
    require_commands("sbatch")
    if not SCRIPT.exists():
        raise EnvironmentFault(f"{SCRIPT} is not here; call this from the project's root directory")
    result = subprocess.run(
        ["sbatch", "--parsable", str(SCRIPT), *script_args],
        capture_output=True,
        text=True,
        check=False,
        env=submission_environment(os.environ),
    )
    if result.returncode != 0:
        raise EnvironmentFault(f"sbatch refused the job: {' '.join(result.stderr.split())}")
    return result.stdout.strip().split(";")[0]


def job_states(job_id: str) -> set[str] | None:
    """States of the job's components (PENDING, RUNNING…); empty once Slurm has forgotten the job, None when Slurm does not answer."""
    argv = ["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T"]
    result = subprocess.run(argv, capture_output=True, text=True, check=False, env=submission_environment(os.environ))
    if result.returncode == 0:
        return set(result.stdout.split())
    return set() if "Invalid job id" in result.stderr else None


def job_output(job_id: str) -> Path:
    """Where the job's own output goes: Slurm's word, as the user may have told it another place; without one, what the script says."""
    argv = ["scontrol", "show", "job", job_id]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, timeout=30, env=submission_environment(os.environ)
        )
        told = re.search(r"^\s*StdOut=(.+)$", done.stdout, re.MULTILINE)
    except (OSError, subprocess.TimeoutExpired):
        told = None
    return Path(told[1] if told else f"slurm-{job_id}.out").resolve()
