"""The doctor's job as text, what becomes of one that does not start, and the same check on several nodes as one row."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hpcrl.cli import doctor_job
from hpcrl.cli.doctor_job import Place, job_findings, job_script, roles
from hpcrl.cli.doctor_table import Finding, merged
from hpcrl.config.sections import SlurmSection
from hpcrl.launch.slurm import Slurm

THREE = [Place("train", 1), Place("infer", 2), Place("cpu", 2)]


class Silent(Slurm):
    """Takes a job and leaves it in the state that it is told; ``answers``: what nodes write when it is asked."""

    def __init__(self, state: str, answers: int = 0) -> None:
        self.state, self.answers, self.cancelled, self.folder = state, answers, "", Path()

    def submit(self, script: Path, *, folder: Path | None = None) -> str:
        self.folder = script.parent
        (script.parent / "job.out").write_text("srun: error: no such plugin\n")
        return "44"

    def states(self, job_ids: object) -> dict[str, str]:
        for number in range(self.answers):
            rows = [{"check": "disk", "state": "ok", "detail": "full", "todo": "", "who": ""}]
            (self.folder / "nodes" / f"n{number}.json").write_text(json.dumps(rows))
            (self.folder / f"pairs.json.{number}").write_text(json.dumps({"ranks": 2, "pairs": []}))
        return {"44+0": self.state}

    def cancel(self, job_id: str) -> None:
        self.cancelled = job_id


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def steps(places: list[Place], tmp_path: Path) -> tuple[list[str], list[str]]:
    """The parts of the MPI step and of the step of probes."""
    text = job_script(tmp_path, places)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    mpi, probes = (line.split("srun ", 1)[1].split(" : ") for line in text.splitlines() if "srun " in line)
    return mpi, probes


def test_three_partitions_are_one_het_job_with_an_mpi_world_over_the_first_two(tmp_path: Path) -> None:
    mpi, probes = steps(THREE, tmp_path)
    assert [part.split(" ")[0] for part in mpi] == ["--het-group=0", "--het-group=1"]
    assert [part.split(str(tmp_path))[2].split()[:2] for part in probes] == [
        ["mpi", "5"],
        ["inference", "5"],
        ["sandbox", "5"],
    ]
    assert job_script(tmp_path, THREE).count("#SBATCH hetjob") == 2


def test_one_partition_is_an_ordinary_job(tmp_path: Path) -> None:
    mpi, probes = steps([Place(None, 2)], tmp_path)
    assert len(mpi) == len(probes) == 1
    text = job_script(tmp_path, [Place(None, 2)])
    assert not [word for word in ("het", "--partition") if word in text]


def test_the_mpi_step_gets_what_a_runs_step_gets(tmp_path: Path) -> None:
    section = SlurmSection(mpi="pmix", srun_args=["--constraint=x"], env={"UCX_TLS": "tcp,self"})
    text = job_script(tmp_path, THREE, None, section)
    [mpi] = [line for line in text.splitlines() if "hpcrl.bench.pairs" in line]
    assert mpi.startswith("env UCX_TLS=tcp,self timeout")
    assert mpi.count("--mpi=pmix") == mpi.count("--constraint=x") == 2


def test_who_is_asked_what() -> None:
    assert [roles(count) for count in (1, 2, 3)] == [["all"], ["inference", "sandbox"], ["mpi", "inference", "sandbox"]]


def test_a_job_that_does_not_start_is_the_users_to_solve_and_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_job, "_START_S", 0.0)
    slurm = Silent("PENDING")
    [row] = job_findings(THREE, None, slurm)
    assert (row.state, row.who, slurm.cancelled) == ("broken", "user", "44")
    assert "does not start" in row.detail


def test_a_job_that_fails_says_what_it_printed() -> None:
    slurm = Silent("FAILED")
    [row] = job_findings(THREE, None, slurm)
    assert (row.state, row.who, slurm.cancelled) == ("broken", "admin", "44")
    assert "0 of 5 nodes answered (job 44: FAILED): srun: error: no such plugin" in row.detail
    assert not list(Path.cwd().iterdir())


def test_answers_become_rows() -> None:
    rows = {row.check: row for row in job_findings([Place(None, 2)], None, Silent("RUNNING", answers=2))}
    assert rows["MPI world"].state == "ok"
    assert rows["disk"].detail == "n0, n1: full"


def test_a_world_that_is_too_small_is_broken() -> None:
    rows = {row.check: row for row in job_findings([Place(None, 3)], None, Silent("RUNNING", answers=3))}
    assert rows["MPI world"].state == "ok"

    class Lost(Silent):
        def states(self, job_ids: object) -> dict[str, str]:
            found = super().states(job_ids)
            (self.folder / "pairs.json.2").unlink()
            return found

    rows = {row.check: row for row in job_findings([Place(None, 3)], None, Lost("RUNNING", answers=3))}
    assert (rows["MPI world"].state, rows["MPI world"].who) == ("broken", "user")
    assert "2 of 3 ranks" in rows["MPI world"].detail


def test_the_worst_counts_and_names_its_nodes() -> None:
    good, slow = Finding("disk", "ok", "7 GiB free"), Finding("disk", "slow", "1 GiB free", "free some", "user")
    bad = Finding("disk", "broken", "0 GiB free", "free some", "user")
    assert merged({"a": [good], "b": [good]}) == [Finding("disk", "ok", "a, b: 7 GiB free")]
    assert merged({"a": [good], "b": [bad], "c": [slow]}) == [
        Finding("disk", "broken", "b: 0 GiB free", "free some", "user")
    ]
    assert merged({str(n): [slow] for n in range(5)})[0].detail == "0 and 4 more nodes: 1 GiB free"
