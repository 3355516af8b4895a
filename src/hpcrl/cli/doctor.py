"""``hpcrl doctor``: what of this machine works, as one table: ok or broken, and what to do."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hpcrl.errors import EnvironmentFault, HpcrlError

__all__ = ["doctor"]

_GIB = 1 << 30


def _slurm() -> str:
    if shutil.which("sinfo") is None:
        raise EnvironmentFault("sinfo is not on PATH; load the Slurm module, or: eval $(hpcrl devcluster env)")
    done = subprocess.run(["sinfo", "-h", "-o", "%P %D %T"], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise EnvironmentFault(
            f"sinfo fails: {' '.join(done.stderr.split())}; is SLURM_CONF right? "
            "For the one-machine cluster: hpcrl devcluster up, then eval $(hpcrl devcluster env)"
        )
    types = subprocess.run(["srun", "--mpi=list"], capture_output=True, text=True, timeout=30, check=False)
    if "pmi2" not in types.stdout + types.stderr:
        raise EnvironmentFault("srun has no pmi2 plugin; set slurm.mpi to one that matches your MPI library")
    return "; ".join(done.stdout.split("\n")).strip("; ")


def _mpi() -> str:
    mpiexec = Path(sys.executable).with_name("mpiexec")
    # One rank speaks: two would mix their lines.
    code = (
        "from mpi4py import MPI; MPI.COMM_WORLD.rank or "
        "print(MPI.COMM_WORLD.size, MPI.Get_library_version().split(chr(10))[0])"
    )
    command = [str(mpiexec) if mpiexec.exists() else "mpiexec", "-n", "2", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0 or not done.stdout.startswith("2 "):
        raise EnvironmentFault(f"2 local ranks do not form a world of 2: {(done.stderr or done.stdout).strip()[-200:]}")
    return done.stdout.splitlines()[0][2:80]


def _sandbox() -> str:
    from hpcrl.config.sections import SandboxSection
    from hpcrl.sandbox.check import preflight, unenforced
    from hpcrl.sandbox.images import resolve

    image = resolve(SandboxSection().image)
    asyncio.run(preflight(image))
    done = subprocess.run(["apptainer", "--version"], capture_output=True, text=True, check=False)
    return "; ".join([done.stdout.strip(), *unenforced()])


def _vllm() -> str:
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise EnvironmentFault("vllm is not installed; tools/setup, or pip install 'hpcrl[gpu]'")
    return "installed"


def _shm() -> str:
    usage = shutil.disk_usage("/dev/shm")
    if usage.free < _GIB:
        raise EnvironmentFault(f"/dev/shm has {usage.free / _GIB:.1f} GiB free; two copies of the model must fit")
    return f"{usage.free / _GIB:.0f} GiB free"


def _disk() -> str:
    usage = shutil.disk_usage(os.getcwd())
    if usage.free < 2 * _GIB:
        raise EnvironmentFault(f"{os.getcwd()} has {usage.free / _GIB:.1f} GiB free; free some space")
    return f"{usage.free / _GIB:.0f} GiB free"


CHECKS: dict[str, Callable[[], str]] = {
    "Slurm": _slurm,
    "MPI": _mpi,
    "sandboxes": _sandbox,
    "vLLM": _vllm,
    "/dev/shm": _shm,
    "disk": _disk,
}


def doctor(config: Path | None) -> bool:
    """Print the table; True when nothing is broken."""
    checks = dict(CHECKS)
    if config is not None:
        checks["configuration"] = lambda: _configuration(config)
    table = Table("check", "state", "detail")
    healthy = True
    for name, check in checks.items():
        try:
            table.add_row(name, "[green]ok", check())
        except (HpcrlError, OSError, subprocess.TimeoutExpired) as error:
            healthy = False
            table.add_row(name, "[red]broken", str(error))
    Console().print(table)
    return healthy


def _configuration(path: Path) -> str:
    from hpcrl.config import load_config
    from hpcrl.launch.preflight import check_inputs

    check_inputs(load_config(path))
    return f"{path}: model and tasks are well-formed"
