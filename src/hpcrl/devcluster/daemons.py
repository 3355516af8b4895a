"""The daemons on the machine itself: munged with its own key and socket, and slurmctld.

slurmctld runs in the machine's network, bound to the cluster address, with a host name and an /etc/hosts of its own
(it insists on being called what slurm.conf says).
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from hpcrl.devcluster.layout import CONTROLLER
from hpcrl.devcluster.node import last_line
from hpcrl.devcluster.procs import ProcessId, end, load_identity, run_tool, spawn, wait_for
from hpcrl.errors import EnvironmentFault

_SLURMCTLD = """\
set -eu
hostname "$1"
mount --bind "$2" /etc/hosts
exec slurmctld -D
"""


class Daemon:
    """A daemon known by its pid file. Example: ``Daemon("munged", state/"munge")``."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        self._pid_file = directory / f"{name}.id"

    def running(self) -> ProcessId | None:
        """The process, or None."""
        found = load_identity(self._pid_file)
        return found if found is not None and found.alive() else None

    def start(self, argv: list[str], env: dict[str, str]) -> ProcessId:
        """Start it and record who it is."""
        process = spawn(argv, log=self.directory / f"{self.name}.out", env=env)
        self._pid_file.write_text(process.dump(), encoding="ascii")
        return process

    def stop(self, *, grace_s: float) -> None:
        """End it if it runs."""
        process = self.running()
        if process is not None:
            end([process], grace_s=grace_s)


def munged(state_dir: Path) -> Daemon:
    return Daemon("munged", state_dir / "munge")


def slurmctld(state_dir: Path) -> Daemon:
    return Daemon("slurmctld", state_dir / "slurmctld")


def start_munged(state_dir: Path, env: dict[str, str]) -> bool:
    """Start munged unless it runs; True if it had to be started. Raises EnvironmentFault."""
    daemon = munged(state_dir)
    if daemon.running() is not None:
        return False
    directory = daemon.directory
    directory.mkdir(parents=True, exist_ok=True)
    key, sock = directory / "key", directory / "socket"
    if not key.exists():
        with open(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(os.urandom(1024))
    for stale in directory.glob("socket*"):
        stale.unlink()
    files = {"key-file": key, "socket": sock, "pid-file": directory / "munged.pid", "seed-file": directory / "seed"}
    log = directory / "munged.log"
    options = [f"--{option}={path}" for option, path in files.items()]
    process = daemon.start(["munged", "--foreground", f"--log-file={log}", *options], env)
    if not wait_for(lambda: _accepts(sock) or not process.alive(), timeout_s=10) or not process.alive():
        raise EnvironmentFault(f"munged did not start: {last_line(log if log.exists() else directory / 'munged.out')}")
    return True


def start_slurmctld(state_dir: Path, hosts: Path, env: dict[str, str]) -> bool:
    """Start slurmctld unless it runs and wait until it answers; True if it had to be started. Raises EnvironmentFault."""
    daemon = slurmctld(state_dir)
    process = daemon.running()
    started = process is None
    if process is None:
        (daemon.directory / "state").mkdir(parents=True, exist_ok=True)
        argv = ["unshare", "--mount", "--uts", "sh", "-c", _SLURMCTLD, "sh", CONTROLLER, str(hosts)]
        process = daemon.start(argv, env)
    living = process
    answered = wait_for(lambda: answers(env) or not living.alive(), timeout_s=20, poll_s=0.1)
    if not answered or not living.alive():
        raise EnvironmentFault(f"slurmctld did not start: {last_line(daemon.directory / 'slurmctld.out')}")
    return started


def answers(env: dict[str, str]) -> bool:
    """True if slurmctld answers."""
    try:
        return "is UP" in run_tool(["scontrol", "ping"], env=env)
    except EnvironmentFault:
        return False


def slurm_version() -> tuple[int, int]:
    """(year, month) of the installed Slurm. Example: (22, 5)."""
    text = run_tool(["slurmd", "-V"])
    match = re.search(r"(\d+)\.(\d+)", text)
    if match is None:
        raise EnvironmentFault(f"slurmd -V: cannot read a version from {text.strip()!r}")
    return int(match[1]), int(match[2])


def free_ports(address: str, start: int) -> tuple[int, int]:
    """Two neighbouring TCP ports that nothing listens on at ``address``, at or after ``start``."""
    for port in range(start, start + 2000, 2):
        if all(_bindable(address, number) for number in (port, port + 1)):
            return port, port + 1
    raise EnvironmentFault(f"no free ports at {address} in {start}..{start + 2000}")


def _bindable(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
