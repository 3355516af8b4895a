"""The doctor on a real Slurm: silent when all is well, and faults that are planted are named, each by its own check."""

from __future__ import annotations

import pytest
from hetjobs import ROOT, Jobs

from hpcrl.bench.planted import FAULTS, Site, problem

pytestmark = [pytest.mark.slurm, pytest.mark.apptainer, pytest.mark.mpi, pytest.mark.timeout(600)]

PARTITIONS = ("--partition", "train", "--partition", "infer", "--partition", "cpu")


@pytest.mark.vllm
def test_nothing_is_said_of_a_healthy_cluster(jobs: Jobs) -> None:
    rows = Site(jobs.cluster, jobs.folder).ask("configs/quickstart.yaml", *PARTITIONS)
    assert {name: row for name, row in rows.items() if row["state"] != "ok"} == {}
    assert len(rows) >= 33
    assert rows["MPI world"]["detail"].startswith("3 ranks")
    assert rows["MPI between nodes"]["detail"].startswith("3 pairs")
    assert "first token after" in rows["vLLM on a node"]["detail"]
    assert "reaches 5 of 5 nodes" in rows["ports between nodes"]["detail"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(jobs: Jobs, fault: str) -> None:
    site = Site(jobs.cluster, jobs.folder)
    with FAULTS[fault].plant(site):
        rows = site.ask("--partition", "cpu")
    assert problem(FAULTS[fault], rows) == ""


def test_nothing_is_left(jobs: Jobs) -> None:
    Site(jobs.cluster, jobs.folder).ask("--partition", "cpu")
    assert list(ROOT.glob(".hpcrl-doctor-*")) == []
    assert jobs.slurm("squeue", "-h", "-t", "running,pending") == ""
