"""What became of a submitted job, for somebody who follows its run."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from hpcrl.launch.environment import submission_environment

__all__ = ["job_output", "job_states"]


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
