"""The doctor on a real Slurm: silent when all is well, and faults that are planted are named, each by its own check."""

from __future__ import annotations

import json
import shutil
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
        self.config: tuple[str, ...] = ()
        self.prefix: tuple[str, ...] = ()

    def ask(self, *argv: str, prefix: tuple[str, ...] = ()) -> dict[str, dict[str, str]]:
        command = [*prefix, str(HPCRL), "doctor", "--json", *argv]
        done = subprocess.run(
            command, env=self.env, cwd=self.cwd, capture_output=True, text=True, timeout=500, check=False
        )
        return {row["check"]: row for row in json.loads(done.stdout)}

    def on_node(self, node: str, *argv: str) -> None:
        line, env = self.jobs.cluster.command(list(argv), node=node)
        subprocess.run(line, env=env, check=True, timeout=60)


Fault = Callable[[Site], AbstractContextManager[None]]


def node_state(node: str, state: str) -> Fault:
    @contextmanager
    def plant(site: Site) -> Iterator[None]:
        site.jobs.slurm("scontrol", "update", f"nodename={node}", f"state={state}", "reason=test")
        try:
            yield
        finally:
            site.jobs.slurm("scontrol", "update", f"nodename={node}", "state=resume")

    return plant


@contextmanager
def partition_down(site: Site) -> Iterator[None]:
    site.jobs.slurm("scontrol", "update", "partitionname=cpu", "state=down")
    try:
        yield
    finally:
        site.jobs.slurm("scontrol", "update", "partitionname=cpu", "state=up")


@contextmanager
def own_tmp(site: Site) -> Iterator[None]:
    """Nodes have a /tmp of their own."""
    site.cwd = Path("/tmp")
    yield


def variable(name: str, value: str) -> Fault:
    @contextmanager
    def plant(site: Site) -> Iterator[None]:
        site.env[name] = value
        yield

    return plant


def without(*names: str) -> Fault:
    """PATH with everything but these commands."""

    @contextmanager
    def plant(site: Site) -> Iterator[None]:
        folder = site.jobs.folder / "bin"
        folder.mkdir()
        for place in site.env["PATH"].split(":"):
            for path in Path(place).glob("*") if Path(place).is_dir() else ():
                if path.name not in names and not (folder / path.name).is_symlink():
                    (folder / path.name).symlink_to(path)
        site.env["PATH"] = str(folder)
        yield

    return plant


def without_plugins(*patterns: str) -> Fault:
    """A Slurm installed without these plugins, as the user's commands see it."""

    @contextmanager
    def plant(site: Site) -> Iterator[None]:
        folder = site.jobs.folder / "plugins"
        folder.mkdir()
        installed = Path(
            next(
                line
                for line in site.jobs.slurm("scontrol", "show", "config").splitlines()
                if line.startswith("PluginDir")
            )
            .split("=")[1]
            .strip()
        )
        for path in installed.iterdir():
            if not any(path.match(pattern) for pattern in patterns):
                (folder / path.name).symlink_to(path)
        conf = site.jobs.folder / "etc"
        shutil.copytree(Path(site.env["SLURM_CONF"]).parent, conf)
        with open(conf / "slurm.conf", "a") as file:
            file.write(f"PluginDir={folder}\n")
        site.env["SLURM_CONF"] = str(conf / "slurm.conf")
        yield

    return plant


@contextmanager
def settings(site: Site, **changed: object) -> Iterator[None]:
    """Other settings in the cluster's own slurm.conf."""
    conf = Path(site.env["SLURM_CONF"])
    before = conf.read_text()
    kept = [line for line in before.splitlines() if line.split("=")[0] not in changed]
    conf.write_text("\n".join([*[f"{key}={value}" for key, value in changed.items()], *kept]) + "\n")
    site.jobs.slurm("scontrol", "reconfigure")
    try:
        yield
    finally:
        conf.write_text(before)
        site.jobs.slurm("scontrol", "reconfigure")


_SHIFT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, now);
    if (id == CLOCK_REALTIME) now->tv_sec += 90;
    return failed;
}
"""


@contextmanager
def wrong_clock(site: Site) -> Iterator[None]:
    """Nodes whose tasks live 90 s in the future: Slurm's task prolog gives them a C library that says so."""
    folder = site.jobs.folder / "clock"
    folder.mkdir()
    (folder / "shift.c").write_text(_SHIFT)
    argv = ["gcc", "-shared", "-fPIC", "-o", str(folder / "shift.so"), str(folder / "shift.c"), "-ldl"]
    subprocess.run(argv, check=True, timeout=60)
    prolog = folder / "prolog"
    prolog.write_text(f"#!/bin/sh\necho export LD_PRELOAD={folder}/shift.so\n")
    prolog.chmod(0o755)
    with settings(site, TaskProlog=prolog):
        yield


@contextmanager
def slow_links(site: Site) -> Iterator[None]:
    site.jobs.cluster.limit_links("100mbit")
    try:
        yield
    finally:
        site.jobs.cluster.limit_links(None)


@contextmanager
def full_memory(site: Site) -> Iterator[None]:
    """A /dev/shm of 64 MiB on one node."""
    site.on_node("cpu2", "mount", "-o", "remount,size=64m", "/dev/shm")
    try:
        yield
    finally:
        site.on_node("cpu2", "mount", "-o", "remount,size=50%", "/dev/shm")


@contextmanager
def wrong_network(site: Site) -> Iterator[None]:
    """Every node announces an address of a network of its own, as a host name in /etc/hosts may make it."""
    prolog = site.jobs.folder / "prolog"
    addresses = {"cpu1": "198.51.100.1", "cpu2": "198.51.100.2"}
    cases = "".join(f"{node}) echo export HPCRL_ADDRESS={address};;\n" for node, address in addresses.items())
    prolog.write_text(f"#!/bin/sh\ncase $(hostname) in\n{cases}esac\n")
    prolog.chmod(0o755)
    for node, address in addresses.items():
        site.on_node(node, "ip", "address", "add", f"{address}/32", "dev", "lo")
    try:
        with settings(site, TaskProlog=prolog):
            yield
    finally:
        for node, address in addresses.items():
            site.on_node(node, "ip", "address", "del", f"{address}/32", "dev", "lo")


@contextmanager
def wrong_pmi(site: Site) -> Iterator[None]:
    """A configuration for another MPI library than the one that is installed."""
    config = site.jobs.folder / "other.yaml"
    config.write_text((ROOT / "configs/quickstart.yaml").read_text() + "slurm: {mpi: none}\n")
    site.config = (str(config),)
    yield


@contextmanager
def few_files(site: Site) -> Iterator[None]:
    site.prefix = ("prlimit", "--nofile=1024")
    yield


FAULTS: dict[str, tuple[Fault, str, str, str, str]] = {
    "no slurm": (without("sinfo"), "Slurm", "broken", "sinfo is not on PATH", "user"),
    "wrong configuration": (variable("SLURM_CONF", "/nowhere/slurm.conf"), "Slurm", "broken", "sinfo fails", "user"),
    "a drained node": (node_state("cpu2", "drain"), "nodes of cpu", "slow", "1 of 2 nodes", "admin"),
    "no node": (node_state("cpu[1-2]", "drain"), "nodes of cpu", "broken", "no usable node", "admin"),
    "a partition that is down": (partition_down, "nodes of cpu", "broken", "partition cpu is down", "admin"),
    "a directory of this machine": (own_tmp, "a step on a node of cpu", "broken", "/tmp is not visible", "user"),
    "a clock": (wrong_clock, "a step on a node of cpu", "broken", "clock is +", "admin"),
    "no pmi": (
        without_plugins("mpi_pmi*", "mpi_cray*"),
        "PMI",
        "broken",
        "neither pmi2 nor pmix",
        "admin",
    ),
    "a pmix that hangs": (without_plugins("mpi_pmi2.so"), "PMI", "broken", "bug 16314", "admin"),
    "no apptainer": (without("apptainer"), "sandboxes", "broken", "apptainer is not on PATH", "user"),
    "no address": (variable("HPCRL_ADDRESS", "127.0.0.1"), "address", "broken", "no address but loopback", "user"),
    "no requeue": (lambda site: settings(site, JobRequeue=0), "Slurm settings", "slow", "JobRequeue=0", "user"),
    "too few open files": (few_files, "open files", "broken", "at most 1024 open files", "admin"),
    "a slow network": (slow_links, "MPI between nodes", "slow", "(cpu1–cpu2)", "admin"),
    "a full memory": (full_memory, "/dev/shm of nodes", "broken", "cpu2: /dev/shm has 0.1 of 1.0 GiB", "admin"),
    "a wrong network": (wrong_network, "ports between nodes", "broken", "cannot reach cpu2 (198.51.100.2:", "admin"),
    "another PMI": (wrong_pmi, "MPI world", "broken", "size 1 but the job has 2 ranks", "user"),
}
"""What is planted, and the row that must name it: check, state, cause, who. No command lies: the faults are the cluster's own, the
user's variables, or what is not installed."""


PARTITIONS = ("--partition", "train", "--partition", "infer", "--partition", "cpu")


@pytest.mark.vllm
def test_nothing_is_said_of_a_healthy_cluster(jobs: Jobs) -> None:
    rows = Site(jobs).ask("configs/quickstart.yaml", *PARTITIONS)
    assert {name: row for name, row in rows.items() if row["state"] != "ok"} == {}
    assert len(rows) >= 33
    assert rows["MPI world"]["detail"].startswith("3 ranks")
    assert rows["MPI between nodes"]["detail"].startswith("3 pairs")
    assert "first token after" in rows["vLLM on a node"]["detail"]
    assert "reaches 5 of 5 nodes" in rows["ports between nodes"]["detail"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(jobs: Jobs, fault: str) -> None:
    plant, check, state, cause, who = FAULTS[fault]
    site = Site(jobs)
    with plant(site):
        rows = site.ask(*site.config, "--partition", "cpu", prefix=site.prefix)
    assert check in rows, rows
    row = rows[check]
    assert (row["state"], row["who"]) == (state, who), row
    assert cause in row["detail"]
    assert row["todo"]


def test_nothing_is_left(jobs: Jobs) -> None:
    Site(jobs).ask("--partition", "cpu")
    assert list(ROOT.glob(".hpcrl-doctor-*")) == []
    assert jobs.slurm("squeue", "-h", "-t", "running,pending") == ""
