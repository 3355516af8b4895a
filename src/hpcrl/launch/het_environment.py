"""What a task of :class:`hpcrl.launch.HetExecutor` knows of its job: a plugin of submitit (entry point ``job_environment``)."""

from __future__ import annotations

import os
from typing import ClassVar

from submitit.slurm.slurm import SlurmJobEnvironment

from hpcrl.launch.outcome import leader_of

__all__ = ["COMPONENT", "HetSlurmJobEnvironment"]

COMPONENT = "HPCRL_HET_ID"
"""Variable that names the task's component, for example ``44+1``: none of Slurm's own does."""


class HetSlurmJobEnvironment(SlurmJobEnvironment):  # type: ignore[misc]
    """submitit finds a task's files by the component's id; Slurm requeues the whole job, by its leader's."""

    _env: ClassVar[dict[str, str]] = {**SlurmJobEnvironment._env, "job_id": COMPONENT}

    def _requeue(self, countdown: int) -> None:
        """Every component gets the signal and saves itself; the first one asks for the requeue, which takes all along."""
        component = os.environ[COMPONENT]
        if component.endswith("+0"):
            from hpcrl.launch.slurm import Slurm

            Slurm().requeue(leader_of(component))
