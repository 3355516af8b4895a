"""What Slurm tells a heterogeneous job's batch script about itself. Pure: reads a mapping, usually ``os.environ``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpcrl.errors import EnvironmentFault

__all__ = ["HetGroup", "HetJob", "clean_environment", "submission_environment"]

GROUPS = ("trainer", "inference", "sandbox")


@dataclass(frozen=True, slots=True)
class HetGroup:
    """One component: its index, number of nodes and of tasks (``--ntasks``), and ``--cpus-per-task`` where it was given."""

    index: int
    nodes: int
    tasks: int
    cpus_per_task: int | None = None


@dataclass(frozen=True, slots=True)
class HetJob:
    """The job: its leader's id and the three components in the order trainer, inference, sandbox. ``restarted``: it was requeued."""

    job_id: str
    groups: tuple[HetGroup, HetGroup, HetGroup]
    restarted: bool = False

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> HetJob:
        """Raises EnvironmentFault outside a job, and for a job that does not have exactly three components."""
        job_id = env.get("SLURM_JOB_ID")
        if job_id is None:
            raise EnvironmentFault(
                "this must run inside a Slurm job: sbatch slurm/launch_hetjob.sh CONFIG (or hpcrl run CONFIG --launcher local)"
            )
        size = int(env.get("SLURM_HET_SIZE", "1"))
        if size != len(GROUPS):
            raise EnvironmentFault(
                f"the job has {size} component(s), but needs 3 (trainer, inference, sandbox), separated by '#SBATCH hetjob' "
                "or ':' on the command line; start from slurm/launch_hetjob.sh"
            )
        trainer, inference, sandbox = (_group(env, index) for index in range(size))
        return cls(job_id, (trainer, inference, sandbox), int(env.get("SLURM_RESTART_COUNT", "0")) > 0)


def _group(env: Mapping[str, str], index: int) -> HetGroup:
    suffix = f"_HET_GROUP_{index}"
    nodes = int(env.get(f"SLURM_JOB_NUM_NODES{suffix}") or env.get(f"SLURM_NNODES{suffix}") or 1)
    tasks = env.get(f"SLURM_NTASKS{suffix}")
    per_node = env.get(f"SLURM_NTASKS_PER_NODE{suffix}") or env.get(f"SLURM_TASKS_PER_NODE{suffix}", "1").split("(")[0]
    cpus = env.get(f"SLURM_CPUS_PER_TASK{suffix}")
    return HetGroup(index, nodes, int(tasks) if tasks else nodes * int(per_node), int(cpus) if cpus else None)


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` without what a surrounding Slurm job or MPI world would leak into a new submission; SLURM_CONF stays."""
    leaks = ("SLURM_", "SBATCH_", "SRUN_", "PMI_", "PMIX_", "OMPI_", "HYDRA_", "MPIR_")
    return {key: value for key, value in env.items() if key == "SLURM_CONF" or not key.startswith(leaks)}


def submission_environment(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` for sbatch and squeue: the user's own settings count (SBATCH_ACCOUNT…), those of a job that we are in do not."""
    return clean_environment(env) if "SLURM_JOB_ID" in env else dict(env)
