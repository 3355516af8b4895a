"""The doctor on a real Slurm: silent when all is well, and faults that are planted are named, each by its own check."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from hetjobs import ROOT, Jobs

pytestmark = [pytest.mark.slurm, pytest.mark.apptainer, pytest.mark.mpi, pytest.mark.timeout(600)]

HPCRL = Path(sys.executable).with_name("hpcrl")


class Site:
    """Where the doctor is asked: a directory and variables that a fault may change."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs, self.cwd, self.env = jobs, ROOT, dict(jobs.env)

    def ask(self, *argv: str, prefix: tuple[str, ...] = ()) -> dict[str, dict[str, str]]:
        command = [*prefix, str(HPCRL), "doctor", "--json", *argv]
        done = subprocess.run(
            command, env=self.env, cwd=self.cwd, capture_output=True, text=True, timeout=300, check=False
        )
        return {row["check"]: row for row in json.loads(done.stdout)}

    def without(self, folder: Path, *names: str) -> None:
        """PATH with everything but these commands."""
        folder.mkdir()
        for place in self.env["PATH"].split(":"):
            for path in Path(place).glob("*") if Path(place).is_dir() else ():
                if path.name not in names and not (folder / path.name).is_symlink():
                    (folder / path.name).symlink_to(path)
        self.env["PATH"] = str(folder)

    def fake(self, folder: Path, name: str, script: str) -> None:
        """A command of that name, first on PATH."""
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
        self.env["PATH"] = f"{folder}:{self.env['PATH']}"


@contextmanager
def node_state(site: Site, node: str, state: str) -> Iterator[None]:
    site.jobs.slurm("scontrol", "update", f"nodename={node}", f"state={state}", "reason=test")
    try:
        yield
    finally:
        site.jobs.slurm("scontrol", "update", f"nodename={node}", "state=resume")


@contextmanager
def partition_down(site: Site) -> Iterator[None]:
    site.jobs.slurm("scontrol", "update", "partitionname=cpu", "state=down")
    try:
        yield
    finally:
        site.jobs.slurm("scontrol", "update", "partitionname=cpu", "state=up")


@contextmanager
def changed(site: Site, change: Callable[[Site, Path], None]) -> Iterator[None]:
    change(site, site.jobs.folder / "bin")
    yield


def own_tmp(site: Site, _: Path) -> None:
    """Nodes have a /tmp of their own."""
    site.cwd = Path("/tmp")


def loopback(site: Site, _: Path) -> None:
    site.env["HPCRL_ADDRESS"] = "127.0.0.1"


def wrong_conf(site: Site, folder: Path) -> None:
    site.env["SLURM_CONF"] = str(folder / "slurm.conf")


FAULTS: dict[str, tuple[Callable[[Site], AbstractContextManager[None]], str, str, str, str]] = {
    "no slurm": (
        lambda s: changed(s, lambda s, f: s.without(f, "sinfo")),
        "Slurm",
        "broken",
        "sinfo is not on PATH",
        "user",
    ),
    "wrong configuration": (lambda s: changed(s, wrong_conf), "Slurm", "broken", "sinfo fails", "user"),
    "a drained node": (lambda s: node_state(s, "cpu2", "drain"), "nodes of cpu", "slow", "1 of 2 nodes", "admin"),
    "no node": (lambda s: node_state(s, "cpu[1-2]", "drain"), "nodes of cpu", "broken", "no usable node", "admin"),
    "a partition that is down": (partition_down, "nodes of cpu", "broken", "partition cpu is down", "admin"),
    "a directory of this machine": (
        lambda s: changed(s, own_tmp),
        "a step on a node of cpu",
        "broken",
        "/tmp is not visible",
        "user",
    ),
    "a clock": (
        lambda s: changed(
            s,
            lambda s, f: s.fake(f, "srun", 'case "$*" in *--mpi=list*) exec /usr/bin/srun "$@";; esac; echo "0 1000"'),
        ),
        "a step on a node of cpu",
        "broken",
        "clock is",
        "admin",
    ),
    "no pmi": (
        lambda s: changed(
            s,
            lambda s, f: s.fake(
                f, "srun", 'case "$*" in *--mpi=list*) echo none; exit;; esac; exec /usr/bin/srun "$@"'
            ),
        ),
        "PMI",
        "broken",
        "neither pmi2 nor pmix",
        "admin",
    ),
    "a pmix that hangs": (
        lambda s: changed(
            s,
            lambda s, f: s.fake(
                f,
                "srun",
                'case "$*" in *list*) echo pmix_v4; exit;; *version*) echo slurm 22.05.8; exit;; esac; exec /usr/bin/srun "$@"',
            ),
        ),
        "PMI",
        "broken",
        "bug 16314",
        "admin",
    ),
    "no apptainer": (
        lambda s: changed(s, lambda s, f: s.without(f, "apptainer")),
        "sandboxes",
        "broken",
        "apptainer is not on PATH",
        "user",
    ),
    "no address": (lambda s: changed(s, loopback), "address", "broken", "no address but loopback", "user"),
    "no requeue": (
        lambda s: changed(s, lambda s, f: s.fake(f, "scontrol", 'echo "JobRequeue              = 0"')),
        "Slurm settings",
        "slow",
        "JobRequeue=0",
        "user",
    ),
}
"""What is planted, and the row that must name it: check, state, cause, who."""


def test_nothing_is_said_of_a_healthy_cluster(jobs: Jobs) -> None:
    rows = Site(jobs).ask("--partition", "train", "--partition", "infer", "--partition", "cpu")
    assert {name: row for name, row in rows.items() if row["state"] != "ok"} == {}
    assert len(rows) >= 19


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(jobs: Jobs, fault: str) -> None:
    plant, check, state, cause, who = FAULTS[fault]
    site = Site(jobs)
    with plant(site):
        row = site.ask("--partition", "cpu")[check]
    assert (row["state"], row["who"]) == (state, who), row
    assert cause in row["detail"]
    assert row["todo"]


def test_too_few_open_files(jobs: Jobs) -> None:
    row = Site(jobs).ask("--partition", "cpu", prefix=("prlimit", "--nofile=1024"))["open files"]
    assert (row["state"], row["who"]) == ("broken", "admin"), row
    assert "at most 1024 open files" in row["detail"]
