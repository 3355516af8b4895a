"""Submit slurm/launch_hetjob.sh with sbatch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hpcrl.errors import EnvironmentFault
from hpcrl.launch.environment import clean_environment
from hpcrl.launch.preflight import require_commands

__all__ = ["submit"]

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
        env=clean_environment(os.environ),
    )
    if result.returncode != 0:
        raise EnvironmentFault(f"sbatch refused the job: {' '.join(result.stderr.split())}")
    return result.stdout.strip().split(";")[0]
