"""Submission through stand-ins for sbatch and squeue: ordinary scripts on PATH."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcrl.errors import EnvironmentFault, UserError
from hpcrl.launch.submit import job_output, job_states, submit


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project root as working directory, and an empty folder first on PATH."""
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "launch_hetjob.sh").write_text("#!/bin/bash\n")
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    return tmp_path


def install(site: Path, name: str, script: str) -> None:
    path = site / "bin" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_the_job_id_without_the_clusters_name(site: Path) -> None:
    install(site, "sbatch", f'printf "%s\\n" "$@" > {site}/args; echo "44;cluster"')
    assert submit(["run.yaml", "--set", "a=b"]) == "44"
    assert (site / "args").read_text().split() == ["--parsable", "slurm/launch_hetjob.sh", "run.yaml", "--set", "a=b"]


def test_a_submission_from_within_a_job_is_clean(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "sbatch", f"env > {site}/env; echo 1")
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "7")
    monkeypatch.setenv("SBATCH_PARTITION", "outer")
    monkeypatch.setenv("SLURM_CONF", "/x/slurm.conf")
    submit([])
    seen = (site / "env").read_text().splitlines()
    assert "SLURM_CONF=/x/slurm.conf" in seen
    assert not [line for line in seen if line.startswith(("SLURM_NTASKS", "SBATCH_"))]


def test_the_users_own_settings_reach_sbatch(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "sbatch", f"env > {site}/env; echo 1")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    submit([])
    assert "SBATCH_ACCOUNT=mine" in (site / "env").read_text().splitlines()


def test_a_refusal_is_told_in_slurms_words_on_one_line(site: Path) -> None:
    install(
        site, "sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; echo 'sbatch: failed' >&2; exit 1"
    )
    with pytest.raises(EnvironmentFault) as caught:
        submit([])
    assert str(caught.value) == ("sbatch refused the job: sbatch: error: invalid partition specified: x sbatch: failed")


def test_without_slurm_or_outside_the_project(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(site / "bin"))
    with pytest.raises(UserError, match="sbatch is not on PATH"):
        submit([])
    install(site, "sbatch", "echo 1")
    os.unlink("slurm/launch_hetjob.sh")
    with pytest.raises(EnvironmentFault, match="call this from the project's root directory"):
        submit([])


@pytest.mark.parametrize(
    ("script", "states"),
    [
        ("echo RUNNING; echo RUNNING; echo PENDING", {"RUNNING", "PENDING"}),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", set()),
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", None),
    ],
)
def test_what_became_of_a_job(site: Path, script: str, states: set[str] | None) -> None:
    install(site, "squeue", script)
    assert job_states("44") == states


@pytest.mark.parametrize(
    ("script", "output"),
    [
        (
            "printf 'JobId=44 JobName=hpcrl\\n   StdIn=/dev/null\\n   StdOut=/a b/x-44.out\\n   Power=\\n'",
            "/a b/x-44.out",
        ),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "slurm-44.out"),
    ],
)
def test_the_jobs_output(site: Path, script: str, output: str) -> None:
    install(site, "scontrol", script)
    assert job_output("44") == site / output
