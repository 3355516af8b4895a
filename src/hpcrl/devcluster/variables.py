"""Which of the caller's Slurm variables count for a cluster, pure.

Slurm's commands take options from the environment (SBATCH_PARTITION, SLURM_CLUSTERS…). What a site or an outer job has put there is
for another Slurm. What the user sets in a shell that points to the cluster (``eval "$(hpcrl devcluster env)"``) is for this one.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["foreign"]

_PREFIXES = ("SLURM_", "SLURMD_", "SBATCH_", "SALLOC_", "SRUN_", "SQUEUE_", "SINFO_", "SCANCEL_", "SCONTROL_", "SACCT_")


def foreign(environ: Mapping[str, str], slurm_conf: str) -> set[str]:
    """Names of variables that are meant for another Slurm than that of ``slurm_conf``, or for the job we are in.

    >>> foreign({"SBATCH_PARTITION": "long", "HOME": "/root"}, "/c/slurm.conf")
    {'SBATCH_PARTITION'}
    >>> foreign({"SBATCH_PARTITION": "cpu", "SLURM_CONF": "/c/slurm.conf"}, "/c/slurm.conf")
    set()
    """
    if environ.get("SLURM_CONF") == slurm_conf and "SLURM_JOB_ID" not in environ:
        return set()
    return {name for name in environ if name.startswith(_PREFIXES) and name != "SLURM_CONF"}
