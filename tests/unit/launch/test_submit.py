"""Submission through stand-ins for sbatch and squeue: ordinary scripts on PATH."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.errors import EnvironmentFault, UserError
from hpcrl.launch.slurm import Slurm
from hpcrl.launch.submit import job_output, job_states


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
    assert Slurm().submit(Path("x.sh")) == "44"
    assert (site / "args").read_text().split() == ["--parsable", "x.sh"]


def test_a_submission_from_within_a_job_is_clean(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "sbatch", f"env > {site}/env; echo 1")
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "7")
    monkeypatch.setenv("SBATCH_PARTITION", "outer")
    monkeypatch.setenv("SLURM_CONF", "/x/slurm.conf")
    Slurm().submit(Path("x.sh"))
    seen = (site / "env").read_text().splitlines()
    assert "SLURM_CONF=/x/slurm.conf" in seen
    assert not [line for line in seen if line.startswith(("SLURM_NTASKS", "SBATCH_"))]


def test_the_users_own_settings_reach_sbatch(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "sbatch", f"env > {site}/env; echo 1")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    Slurm().submit(Path("x.sh"))
    assert "SBATCH_ACCOUNT=mine" in (site / "env").read_text().splitlines()


def test_a_refusal_is_told_in_slurms_words_on_one_line(site: Path) -> None:
    install(
        site, "sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; echo 'sbatch: failed' >&2; exit 1"
    )
    with pytest.raises(EnvironmentFault) as caught:
        Slurm().submit(Path("x.sh"))
    assert str(caught.value) == ("sbatch refused the job: sbatch: error: invalid partition specified: x sbatch: failed")


def test_without_slurm(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(site / "bin"))
    with pytest.raises(UserError, match="sbatch is not on PATH"):
        Slurm().submit(Path("x.sh"))


SQUEUE = "printf '44+0|RUNNING\\n44+1|PENDING\\n9|RUNNING\\n'"


def test_states_by_component_and_by_leader(site: Path) -> None:
    install(site, "squeue", SQUEUE)
    assert Slurm().states(["44+1"]) == {"44": "RUNNING", "44+0": "RUNNING", "44+1": "PENDING"}


def test_a_job_that_squeue_has_forgotten_is_asked_of_sacct(site: Path) -> None:
    install(site, "squeue", SQUEUE)
    install(site, "sacct", f"echo \"$@\" > {site}/args; printf '43+0|FAILED\\n43+1|CANCELLED by 0\\n'")
    assert Slurm().states(["44", "43"]).items() >= {"43": "FAILED", "43+1": "CANCELLED by 0"}.items()
    assert "--jobs=43" in (site / "args").read_text().split()


def test_without_accounting_a_forgotten_job_is_left_out(site: Path) -> None:
    install(site, "squeue", "true")
    install(site, "sacct", "echo Slurm accounting storage is disabled >&2; exit 1")
    assert Slurm().states(["44"]) == {}


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
