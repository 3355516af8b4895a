"""The checks of ``hpcrl doctor``: each returns what it saw, or raises a Fault with the cause, what to do, and who can do it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from hpcrl.errors import EnvironmentFault
from hpcrl.protocol.address import routable_address

__all__ = ["Fault", "Who", "here", "nodes_are_up", "on_nodes", "usable_nodes"]

Who = Literal["user", "admin"]

_GIB = 1 << 30
_CLOCK_S = 2.0
_VISIBLE_S = 5.0
_OPEN_FILES = 4096
_START_S = 60
_ANSWER_S = 10


class Fault(EnvironmentFault):
    """Something is broken, or (``slow``) works worse than it could."""

    def __init__(self, cause: str, todo: str, who: Who, *, slow: bool = False) -> None:
        super().__init__(f"{cause}; {todo}")
        self.cause, self.todo, self.who, self.slow = cause, todo, who, slow


def _ask(*argv: str, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)


def slurm_answers() -> str:
    if shutil.which("sinfo") is None:
        raise Fault("sinfo is not on PATH", "load the Slurm module, or: eval $(hpcrl devcluster env)", "user")
    todo = "is SLURM_CONF right? For the one-machine cluster: hpcrl devcluster up, then eval $(hpcrl devcluster env)"
    try:
        done = _ask("sinfo", "--version", timeout_s=_ANSWER_S)
        ping = _ask("sinfo", "-h", "-o", "%P", timeout_s=_ANSWER_S)
    except subprocess.TimeoutExpired as error:
        raise Fault(f"sinfo fails: no answer in {_ANSWER_S} s", todo, "user") from error
    if ping.returncode != 0:
        raise Fault(f"sinfo fails: {' '.join(ping.stderr.split())}", todo, "user")
    return done.stdout.strip()


def usable_nodes(partition: str | None, most: int) -> int:
    """Nodes of ``partition`` (None: the default one) that a job can have, at most ``most``."""
    rows = [line.split("|") for line in _ask("sinfo", "-h", "-o", "%P|%D|%T").stdout.splitlines() if "|" in line]
    mine = [row for row in rows if row[0].rstrip("*") == partition or (partition is None and row[0].endswith("*"))]
    return max(1, min(most, sum(int(row[1]) for row in mine if not _UNUSABLE.search(row[2]))))


_UNUSABLE = re.compile(r"down|drain|fail|\*|maint")


def nodes_are_up(partition: str | None = None) -> str:
    """Without any usable node in a partition a job waits for ever."""
    rows = [line.split("|") for line in _ask("sinfo", "-h", "-o", "%R|%a|%D|%T").stdout.splitlines() if "|" in line]
    rows = [row for row in rows if partition in (None, row[0])]
    if not rows:
        raise Fault(f"no partition {partition or ''}".strip(), "choose one of `sinfo`", "user")
    names = dict.fromkeys(row[0] for row in rows)
    for name in names:
        if any(row[0] == name and row[1] != "up" for row in rows):
            raise Fault(f"partition {name} is down", f"scontrol update partition={name} state=up", "admin")
    for name in names:
        usable = sum(int(row[2]) for row in rows if row[0] == name and not _UNUSABLE.search(row[3]))
        lost = sum(int(row[2]) for row in rows if row[0] == name and _UNUSABLE.search(row[3]))
        todo = "see `sinfo -R`; scontrol update nodename=NODE state=resume"
        if not usable:
            raise Fault(f"partition {name} has no usable node: {lost} down or drained", todo, "admin")
        if lost:
            raise Fault(
                f"partition {name}: {lost} of {lost + usable} nodes are down or drained", todo, "admin", slow=True
            )
    return ", ".join(names)


def pmi_plugin() -> str:
    listed = _ask("srun", "--mpi=list")
    plugins = set(re.findall(r"\b(pmi2|pmix\w*|cray_shasta)\b", listed.stdout + listed.stderr))
    if not plugins:
        raise Fault(
            "srun has neither pmi2 nor pmix", "install Slurm's pmi2 plugin (package libpmi2-0, contribs/pmi2)", "admin"
        )
    version = tuple(int(part) for part in re.findall(r"\d+", _ask("srun", "--version").stdout)[:3])
    if "pmi2" not in plugins and version < (23, 2, 2):
        raise Fault(
            "only pmix, and this Slurm hangs in heterogeneous steps with it (bug 16314, fixed in 23.02.2)",
            "install the pmi2 plugin and use MPICH, or update Slurm",
            "admin",
        )
    return ", ".join(sorted(plugins))


def slurm_settings() -> str:
    """What ends or keeps long runs. Reading the configuration needs no rights."""
    found = dict(
        line.split("=", 1)
        for line in re.sub(r"[ ]*=[ ]*", "=", _ask("scontrol", "show", "config").stdout).splitlines()
        if "=" in line
    )
    if found.get("JobRequeue", "1") == "0":
        raise Fault(
            "JobRequeue=0: a job is not started again after a node failure",
            "keep #SBATCH --requeue in the script",
            "user",
            slow=True,
        )
    if int(re.sub(r"\D", "", found.get("KillWait", "30")) or 30) < 5:
        raise Fault(
            f"KillWait={found['KillWait']}: no time for a last word",
            "set KillWait to 30 in slurm.conf",
            "admin",
            slow=True,
        )
    limit = re.sub(r"\D", "", found.get("MaxJobCount", "")) or "0"
    if 0 < int(limit) < 3:
        raise Fault(f"MaxJobCount={limit}: a heterogeneous job counts as three", "raise MaxJobCount", "admin")
    if "backfill" not in found.get("SchedulerType", "backfill"):
        raise Fault(
            f"SchedulerType={found['SchedulerType']}: heterogeneous jobs start through backfill only",
            "SchedulerType=sched/backfill",
            "admin",
        )
    storage = found.get("AccountingStorageType", "")
    return "no accounting (states come from squeue)" if "none" in storage else storage


def on_nodes(partition: str | None) -> str:
    """A step on one node (of ``partition``): does it start, does it see this directory, does its clock agree?"""
    with tempfile.TemporaryDirectory(prefix=".hpcrl-doctor-", dir=".") as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "here").write_text("x")
        script = (
            'i=0; while [ ! -r "$1/here" ] && [ $i -lt 100 ]; do sleep 0.1; i=$((i+1)); done; '
            'if [ -r "$1/here" ]; then echo "$i $(date +%s.%N)"; fi'  # a status other than 0 would be Slurm's alone
        )
        where = [f"--partition={partition}"] if partition else []
        argv = ["srun", "--quiet", "--nodes=1", "--ntasks=1", "--time=2", f"--immediate={_START_S}", *where]
        try:
            done = _ask(*argv, "sh", "-c", script, "sh", str(Path(folder).resolve()), timeout_s=_START_S + 60)
        except subprocess.TimeoutExpired as error:
            raise Fault(
                f"a step of one task did not end in {error.timeout:.0f} s",
                "look at squeue and at slurmd's log",
                "admin",
            ) from error
        now = time.time()
    if done.returncode != 0:
        raise Fault(
            f"no step starts: {' '.join(done.stderr.split())[:200]}",
            "squeue --start says when; or choose another --partition",
            "user",
        )
    if not done.stdout.strip():
        raise Fault(f"{Path.cwd()} is not visible on the nodes", "work in a directory that all nodes share", "user")
    tenths, clock = done.stdout.split()
    if abs(now - float(clock)) > _CLOCK_S:
        raise Fault(f"the node's clock is {float(clock) - now:+.1f} s off", "run chrony or ntpd on all nodes", "admin")
    if int(tenths) > _VISIBLE_S * 10:
        raise Fault(
            f"a new file is seen after {int(tenths) / 10:.1f} s",
            "mount with a shorter acregmax/actimeo",
            "admin",
            slow=True,
        )
    return f"a step starts, sees this directory after {int(tenths) / 10:.1f} s"


def local_mpi() -> str:
    mpiexec = Path(sys.executable).with_name("mpiexec")
    # One rank speaks: two would mix their lines.
    code = "from mpi4py import MPI; MPI.COMM_WORLD.rank or print(MPI.COMM_WORLD.size, MPI.Get_library_version().split(chr(10))[0])"
    try:
        done = _ask(
            str(mpiexec) if mpiexec.exists() else "mpiexec", "-n", "2", sys.executable, "-c", code, timeout_s=60
        )
    except FileNotFoundError as error:
        raise Fault("mpiexec is not on PATH", "load an MPI module, or pip install mpich", "user") from error
    if done.returncode != 0 or not done.stdout.startswith("2 "):
        raise Fault(
            f"2 local ranks do not form a world of 2: {(done.stderr or done.stdout).strip()[-200:]}",
            "use the mpiexec of the MPI library that mpi4py loads (MPI4PY_MPIABI)",
            "user",
        )
    return done.stdout.splitlines()[0][2:80]


def user_namespaces() -> str:
    limit = Path("/proc/sys/user/max_user_namespaces")
    if limit.exists() and limit.read_text().strip() == "0":
        raise Fault("user namespaces are switched off", "sysctl user.max_user_namespaces=15000", "admin")
    if shutil.which("unshare") and _ask("unshare", "--user", "--map-root-user", "true").returncode != 0:
        raise Fault(
            "a user namespace cannot be made",
            "allow unprivileged ones (kernel.apparmor_restrict_unprivileged_userns=0)",
            "admin",
        )
    return "can be made"


def sandboxes() -> str:
    from hpcrl.config.sections import SandboxSection
    from hpcrl.sandbox.check import preflight
    from hpcrl.sandbox.images import resolve

    if shutil.which("apptainer") is None:
        raise Fault("apptainer is not on PATH", "load its module, or have it installed", "user")
    found = asyncio.run(preflight(resolve(SandboxSection().image)))
    said = [_ask("apptainer", "--version").stdout.strip(), *(gap.what for gap in found if gap.late)]
    absent = [f"{gap.what} (remedy: {gap.remedy})" for gap in found if not gap.late]
    if absent:
        said.append(f"a run with limits.strict is refused here: {'; '.join(absent)}")
    return "; ".join(said)


def vllm() -> str:
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise Fault("vllm is not installed", "tools/setup, or pip install 'hpcrl[gpu]'", "user")
    return "installed"


def memory_files() -> str:
    free = shutil.disk_usage("/dev/shm").free
    if free < _GIB:
        raise Fault(
            f"/dev/shm has {free / _GIB:.1f} GiB free",
            "two copies of the model must fit; remove leftovers, or enlarge it",
            "admin",
        )
    return f"{free / _GIB:.0f} GiB free"


def disk() -> str:
    free = shutil.disk_usage(Path.cwd()).free
    if free < 2 * _GIB:
        raise Fault(f"{Path.cwd()} has {free / _GIB:.1f} GiB free", "free some space", "user")
    return f"{free / _GIB:.0f} GiB free"


def shared_directory() -> str:
    """What SQLite and published files need: locks that hold, and rename over a file."""
    try:
        with tempfile.TemporaryDirectory(prefix=".hpcrl-doctor-", dir=".") as folder:
            first, second = Path(folder) / "a", Path(folder) / "b"
            first.write_text("1")
            second.write_text("2")
            os.replace(first, second)
            with open(second, "rb+") as file:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise Fault(
            f"{Path.cwd()}: {error.strerror}",
            "work in a directory you can write to, with file locks (Lustre: mount -o flock)",
            "user",
        ) from error
    return "rename and locks work"


def open_files() -> str:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _OPEN_FILES:
        raise Fault(
            f"at most {hard} open files", f"raise the hard limit (ulimit -Hn) to {_OPEN_FILES} or more", "admin"
        )
    return "unlimited" if hard == resource.RLIM_INFINITY else str(hard)


def address() -> str:
    found = routable_address()
    if found.startswith("127."):
        raise Fault("this host has no address but loopback", "set HPCRL_ADDRESS to one that other nodes reach", "user")
    return found


def gpus() -> str:
    if shutil.which("nvidia-smi") is None:
        return "none here"
    done = _ask("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    if done.returncode != 0:
        raise Fault(
            f"nvidia-smi fails: {' '.join((done.stderr or done.stdout).split())[:200]}", "reload the driver", "admin"
        )
    return f"{len(done.stdout.splitlines())} x {done.stdout.splitlines()[0]}" if done.stdout.strip() else "none here"


here: dict[str, Callable[[], str]] = {
    "MPI": local_mpi,
    "user namespaces": user_namespaces,
    "sandboxes": sandboxes,
    "vLLM": vllm,
    "GPUs": gpus,
    "/dev/shm": memory_files,
    "disk": disk,
    "run directory": shared_directory,
    "open files": open_files,
    "address": address,
}
