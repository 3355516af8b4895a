from __future__ import annotations

from hpcrl.devcluster.variables import foreign

OURS = "/c/slurm.conf"
SITE = {"SBATCH_PARTITION": "long", "SLURM_CLUSTERS": "big", "SQUEUE_FORMAT": "%i", "HOME": "/root", "UCX_TLS": "tcp"}


def test_the_sites_settings_do_not_count() -> None:
    for conf in ({}, {"SLURM_CONF": "/etc/slurm/slurm.conf"}):
        assert foreign({**SITE, **conf}, OURS) == {"SBATCH_PARTITION", "SLURM_CLUSTERS", "SQUEUE_FORMAT"}


def test_what_is_set_in_a_shell_that_points_to_the_cluster_counts() -> None:
    assert foreign({**SITE, "SLURM_CONF": OURS}, OURS) == set()


def test_the_variables_of_a_job_never_count() -> None:
    inside = {"SLURM_CONF": OURS, "SLURM_JOB_ID": "3", "SLURM_NTASKS": "4", "SBATCH_CPU_BIND": "none"}
    assert foreign(inside, OURS) == {"SLURM_JOB_ID", "SLURM_NTASKS", "SBATCH_CPU_BIND"}
