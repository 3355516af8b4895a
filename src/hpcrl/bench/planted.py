"""Faults planted on a development cluster, each of which ``hpcrl doctor`` must name in one row of its table.

No command lies: the faults are the cluster's own, the user's variables, or what is not installed. Each is taken away again. Nodes
``cpu1`` and ``cpu2``, which are all of partition ``cpu``, are where most of them lie.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpcrl.devcluster import Cluster
from hpcrl.launch.environment import clean_environment

__all__ = ["FAULTS", "Planted", "Site", "name_all", "problem"]

_DOCTOR = (str(Path(sys.executable).with_name("hpcrl")), "doctor", "--json")
_ANSWER_S = 500.0


class Site:
    """Where the doctor is asked: a directory and variables that a fault may change. ``folder`` is empty, and for the fault's files."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.root = self.cwd = Path.cwd()
        self.env = {**clean_environment(os.environ), **cluster.env()}
        self.config: tuple[str, ...] = ()
        self.prefix: tuple[str, ...] = ()

    def ask(self, *argv: str) -> dict[str, dict[str, str]]:
        """Check → row of the doctor's table."""
        command = [*self.prefix, *_DOCTOR, *self.config, *argv]
        done = subprocess.run(
            command, env=self.env, cwd=self.cwd, capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
        return {row["check"]: row for row in json.loads(done.stdout)}

    def slurm(self, *argv: str) -> str:
        """Output of a Slurm command of the cluster's admin."""
        env = {**clean_environment(os.environ), **self.cluster.env()}
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True).stdout

    def on_node(self, node: str, *argv: str) -> None:
        line, env = self.cluster.command(list(argv), node=node)
        subprocess.run(line, env=env, check=True, timeout=60)


Fault = Callable[[Site], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Planted:
    """A fault, and the row that must name it: check, state, a part of the detail, who can do something."""

    plant: Fault
    check: str
    state: str
    cause: str
    who: str


def problem(fault: Planted, rows: dict[str, dict[str, str]]) -> str:
    """What is wrong with the table under this fault; "" when it is named."""
    row = rows.get(fault.check)
    if row is None:
        return f"no row {fault.check}"
    named = (row["state"], row["who"]) == (fault.state, fault.who) and fault.cause in row["detail"] and row["todo"]
    return "" if named else f"{fault.check}: {row}"


def name_all(cluster: Cluster, folder: Path, say: Callable[[str], None]) -> int:
    """How many of ``FAULTS`` the doctor names, one after the other; ``folder`` for their files."""
    named = 0
    for number, (name, fault) in enumerate(FAULTS.items()):
        place = folder / f"fault{number}"
        place.mkdir()
        site = Site(cluster, place)
        with fault.plant(site):
            wrong = problem(fault, site.ask("--partition", "cpu"))
        named += not wrong
        say(f"{name}: {wrong or 'named'}")
    return named


def node_state(node: str, state: str) -> Fault:
    @contextmanager
    def plant(site: Site) -> Iterator[None]:
        site.slurm("scontrol", "update", f"nodename={node}", f"state={state}", "reason=test")
        try:
            yield
        finally:
            site.slurm("scontrol", "update", f"nodename={node}", "state=resume")

    return plant


@contextmanager
def partition_down(site: Site) -> Iterator[None]:
    site.slurm("scontrol", "update", "partitionname=cpu", "state=down")
    try:
        yield
    finally:
        site.slurm("scontrol", "update", "partitionname=cpu", "state=up")


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
        folder = site.folder / "bin"
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
        folder = site.folder / "plugins"
        folder.mkdir()
        installed = Path(
            next(line for line in site.slurm("scontrol", "show", "config").splitlines() if line.startswith("PluginDir"))
            .split("=")[1]
            .strip()
        )
        for path in installed.iterdir():
            if not any(path.match(pattern) for pattern in patterns):
                (folder / path.name).symlink_to(path)
        conf = site.folder / "etc"
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
    site.slurm("scontrol", "reconfigure")
    try:
        yield
    finally:
        conf.write_text(before)
        site.slurm("scontrol", "reconfigure")


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
    folder = site.folder / "clock"
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
    site.cluster.limit_links("100mbit")
    try:
        yield
    finally:
        site.cluster.limit_links(None)


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
    prolog = site.folder / "prolog"
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
    config = site.folder / "other.yaml"
    config.write_text((site.root / "configs/quickstart.yaml").read_text() + "slurm: {mpi: none}\n")
    site.config = (str(config),)
    yield


@contextmanager
def few_files(site: Site) -> Iterator[None]:
    site.prefix = ("prlimit", "--nofile=1024")
    yield


FAULTS: dict[str, Planted] = {
    "no slurm": Planted(without("sinfo"), "Slurm", "broken", "sinfo is not on PATH", "user"),
    "wrong configuration": Planted(
        variable("SLURM_CONF", "/nowhere/slurm.conf"), "Slurm", "broken", "sinfo fails", "user"
    ),
    "a drained node": Planted(node_state("cpu2", "drain"), "nodes of cpu", "slow", "1 of 2 nodes", "admin"),
    "no node": Planted(node_state("cpu[1-2]", "drain"), "nodes of cpu", "broken", "no usable node", "admin"),
    "a partition that is down": Planted(partition_down, "nodes of cpu", "broken", "partition cpu is down", "admin"),
    "a directory of this machine": Planted(own_tmp, "a step on a node of cpu", "broken", "/tmp is not visible", "user"),
    "a clock": Planted(wrong_clock, "a step on a node of cpu", "broken", "clock is +", "admin"),
    "no pmi": Planted(
        without_plugins("mpi_pmi*", "mpi_cray*"),
        "PMI",
        "broken",
        "neither pmi2 nor pmix",
        "admin",
    ),
    "a pmix that hangs": Planted(without_plugins("mpi_pmi2.so"), "PMI", "broken", "bug 16314", "admin"),
    "no apptainer": Planted(without("apptainer"), "sandboxes", "broken", "apptainer is not on PATH", "user"),
    "no address": Planted(
        variable("HPCRL_ADDRESS", "127.0.0.1"), "address", "broken", "no address but loopback", "user"
    ),
    "no requeue": Planted(lambda site: settings(site, JobRequeue=0), "Slurm settings", "slow", "JobRequeue=0", "user"),
    "too few open files": Planted(few_files, "open files", "broken", "at most 1024 open files", "admin"),
    "a slow network": Planted(slow_links, "MPI between nodes", "slow", "(cpu1–cpu2)", "admin"),
    "a full memory": Planted(full_memory, "/dev/shm of nodes", "broken", "cpu2: /dev/shm has 0.1 of 1.0 GiB", "admin"),
    "a wrong network": Planted(
        wrong_network, "ports between nodes", "broken", "cannot reach cpu2 (198.51.100.2:", "admin"
    ),
    "another PMI": Planted(wrong_pmi, "MPI world", "broken", "size 1 but the job has 2 ranks", "user"),
}
