"""One simulated node: namespaces for network, mounts, host name, IPC and processes, held by an init process.

    unshare (on the machine)                    waits for
      └─ init: /bin/sh, pid 1 of the node       reaps orphans; its death ends every process of the node
           └─ slurmd                            daemonises into init
                └─ slurmstepd ...               jobs

Private per node: /tmp (a directory in the state directory), /dev/shm (fresh tmpfs), /proc, /sys, /etc/hosts. Everything
else is the machine's file system and so acts as the shared one. Because each node has its own pid namespace, killing
init is a power cut: no process, however detached or nested, survives it.
"""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

from hpcrl.devcluster.procs import (
    Proc,
    ProcessId,
    end,
    identify,
    load_identity,
    namespace,
    snapshot,
    spawn,
    wait_for,
)
from hpcrl.errors import EnvironmentFault

# The pid is read through the old /proc, which still counts in the machine's numbers. A new /sys shows the links of this
# namespace (UCX looks there for eth0); the cgroup mounts below it are carried over.
_INIT = """\
set -eu
name=$1 dir=$2 hosts=$3
read -r pid rest < /proc/self/stat
hostname "$name"
if [ -d /sys/fs/cgroup ]; then
    mount --rbind /sys/fs/cgroup "$dir/cgroup"
    mount -t sysfs sysfs /sys
    mount --rbind "$dir/cgroup" /sys/fs/cgroup
    umount --lazy "$dir/cgroup"
else
    mount -t sysfs sysfs /sys
fi
mount --bind "$hosts" /etc/hosts
mount --bind "$dir/tmp" /tmp
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs /dev/shm
mount -t proc proc /proc
echo "$pid" > "$dir/ready"
trap 'exit 0' TERM
while :; do sleep 86400 & wait; done
"""


class NodeHost:
    """The namespaces and processes of one node. Example: ``NodeHost("cpu1", state/"nodes"/"cpu1", netns, hosts)``."""

    def __init__(self, name: str, directory: Path, netns: Path, hosts: Path) -> None:
        self.name = name
        self.directory = directory
        self._netns = netns
        self._hosts = hosts

    def init(self) -> ProcessId | None:
        """The node's init process if it runs inside the node's present network namespace."""
        found = load_identity(self.directory / "init.pid")
        if found is None or not found.alive():
            return None
        try:
            inside = namespace(found.pid, "net") == self._netns.stat().st_ino
        except OSError:
            return None
        return found if inside else None

    def boot(self, env: dict[str, str]) -> bool:
        """Start init unless it runs; True if it had to be started. Raises EnvironmentFault with init's own words."""
        if self.init() is not None:
            return False
        self.halt()
        for sub in ("tmp", "cgroup", "spool", "dev"):
            (self.directory / sub).mkdir(parents=True, exist_ok=True)
        (self.directory / "tmp").chmod(0o1777)
        ready, log = self.directory / "ready", self.directory / "init.log"
        ready.unlink(missing_ok=True)
        unshare = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
        script = ["sh", "-c", _INIT, "sh", self.name, str(self.directory), str(self._hosts)]
        holder = spawn(["nsenter", f"--net={self._netns}", *unshare, *script], log=log, env=env)
        wait_for(lambda: _number(ready) is not None or not holder.alive(), timeout_s=20)
        pid = _number(ready)
        init = None if pid is None else identify(pid)
        if init is None:
            end([holder], grace_s=0)
            raise EnvironmentFault(f"node {self.name} did not start: {last_line(log)}")
        (self.directory / "init.pid").write_text(init.dump(), encoding="ascii")
        return True

    def slurmd(self, processes: list[Proc] | None = None) -> ProcessId | None:
        """The node's running slurmd; ``processes`` is a snapshot to look in."""
        init = self.init()
        if init is None:
            return None
        with suppress(OSError):  # init ended meanwhile
            inside = namespace(init.pid, "pid")
            for proc in snapshot() if processes is None else processes:
                if proc.pid_ns == inside and proc.ppid == init.pid and proc.comm == "slurmd":
                    return identify(proc.pid)
        return None

    def start_slurmd(self, env: dict[str, str]) -> bool:
        """Start slurmd unless it runs; True if it had to be started. Raises EnvironmentFault."""
        if self.slurmd() is not None:
            return False
        log = self.directory / "slurmd.out"
        with log.open("ab") as out:
            done = subprocess.run(
                self.enter(["slurmd"]),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                timeout=60,
                check=False,
            )
        if done.returncode != 0 or not wait_for(lambda: self.slurmd() is not None, timeout_s=10, poll_s=0.1):
            raise EnvironmentFault(f"slurmd of node {self.name} did not start: {last_line(log)}")
        return True

    def enter(self, argv: list[str]) -> list[str]:
        """The command line that runs ``argv`` inside the node. Raises EnvironmentFault when the node is down."""
        init = self.init()
        if init is None:
            raise EnvironmentFault(f"node {self.name} is not running; start it with 'hpcrl devcluster up'")
        return ["nsenter", "-t", str(init.pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--", *argv]

    def halt(self) -> None:
        """Kill init and with it everything in the node. The network namespace stays."""
        init = load_identity(self.directory / "init.pid")
        if init is not None:
            end([init], grace_s=0)


def last_line(log: Path) -> str:
    """The last line of a log file, for an error message, followed by the file's name."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return f"{lines[-1] if lines else 'no output'} ({log})"


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
