"""More sandbox nodes for a run that is going on: workers in jobs of their own, which Slurm may take away at any time.

    hpcrl workers add ─► is the run going on, and its coordinator reachable? ─► slurm/workers.sh with this run's options ─► sbatch
    in each job       ─► the same question on its node ─► one srun of workers on all its nodes ─► the end of the run, or of the job

A worker that is told to end (scancel, preemption, time limit) gives its attempts back: they are leased again at once and no retry is
spent. One that is killed without a word is missed after ``coordinator.lease_s``. Scoring stays on the run's own nodes: its leases are
long, and a scorer that vanishes would hold its attempts until they end.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from hpcrl.config import load_config
from hpcrl.errors import EnvironmentFault, HpcrlError, InfraError, UserError
from hpcrl.launch.script import run_script
from hpcrl.launch.slurm import Slurm
from hpcrl.protocol import client as api
from hpcrl.protocol.keyfiles import read_keys
from hpcrl.protocol.rundir import RunDir
from hpcrl.protocol.status import StatusRequest

__all__ = ["SCRIPT", "RunOver", "add_workers", "check_joinable", "worker_step", "workers_script"]

SCRIPT = Path("slurm/workers.sh")

_CONNECT_S = 5.0
_ANSWER_S = 20.0


class RunOver(UserError):
    """There is nothing to join any more."""


def check_joinable(run: RunDir) -> None:
    """The run is going on, its keys are its owner's alone, and its coordinator answers here.

    Raises RunOver, UserError, EnvironmentFault, each saying what to do.
    """
    if not run.config.exists():
        raise UserError(f"{run.root} holds no run that can be seen here (config.resolved.yaml is missing)")
    if run.end.exists():
        raise RunOver(f"the run {run.run_id} has ended{_how(run)}; workers join a run that is going on")
    keys = run.keys / "worker"
    read_keys(run, "worker")
    if stat.S_IMODE(keys.stat().st_mode) & 0o077:
        raise UserError(f"{keys} can be read by others; chmod -R go= {run.keys} {run.token}, or start a new run")
    url = run.endpoint("coordinator")
    if url is None:
        raise UserError(f"the run {run.run_id} has no coordinator yet; wait until it has started")
    _check_reachable(run, url)
    with closing(api.Client(run, "admin", patience_s=_ANSWER_S)) as client:
        try:
            status = client.call(api.STATUS, StatusRequest())
        except InfraError as error:
            raise EnvironmentFault(f"the coordinator of {run.run_id} at {url} does not help: {error}") from error
    if status.stopped:
        raise RunOver(f"the run {run.run_id} is just ending; workers join a run that is going on")


def _how(run: RunDir) -> str:
    try:
        end = json.loads(run.end.read_text(encoding="utf-8"))
        return f" ({end['state']}{': ' + end['reason'] if end['reason'] else ''})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _check_reachable(run: RunDir, url: str) -> None:
    place = urlsplit(url)
    host, port = place.hostname or "", place.port or 0
    if host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback):
        raise UserError(
            f"the run {run.run_id} announced {host}: it runs on one machine alone (--launcher local); submit it to Slurm instead"
        )
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except ConnectionRefusedError as error:
        raise EnvironmentFault(
            f"nobody listens at {url}: the run {run.run_id} was cut off, or its coordinator is being started again; "
            f"see hpcrl status {run.root}"
        ) from error
    except OSError as error:
        raise EnvironmentFault(
            f"{socket.gethostname()} cannot reach the coordinator at {url} ({error.strerror or error}); choose a partition on "
            "the run's network, or set HPCRL_ADDRESS in slurm/launch_hetjob.sh to an address of its batch host that all nodes reach"
        ) from error


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def workers_script(
    script: str, run: RunDir, nodes: int, partition: str | None, *, array: bool = False, sbatch: Sequence[str] = ()
) -> str:
    """The text for sbatch; ``array``: one job per node, so that each comes and goes alone. Pure. Raises UserError."""
    if nodes < 1:
        raise UserError(f"--nodes {nodes}: give 1 or more")
    if ":" in sbatch:
        raise UserError("--sbatch: workers are a job of one component, without ':'")
    sizes = [f"--array=1-{nodes}", "--nodes=1"] if array else [f"--nodes={nodes}"]
    where = [f"--partition={partition}"] if partition else []
    return run_script(script, ["--run-dir", str(run.root)], [*sizes, *where, *sbatch])


def add_workers(
    root: Path,
    nodes: int,
    partition: str | None = None,
    *,
    array: bool = False,
    sbatch: Sequence[str] = (),
    slurm: Slurm | None = None,
) -> str:
    """Submit more workers for the run in ``root``, from the project's root directory; the job's id.

    Raises UserError, EnvironmentFault.
    """
    run = RunDir(root)
    check_joinable(run)
    try:
        script = SCRIPT.read_text(encoding="utf-8")
    except OSError as error:
        raise EnvironmentFault(f"{SCRIPT} is not here; call this from the project's root directory") from error
    text = workers_script(script, run, nodes, partition, array=array, sbatch=sbatch)
    with TemporaryDirectory(prefix="hpcrl-workers-") as folder:
        path = Path(folder) / SCRIPT.name
        path.write_text(text, encoding="utf-8")
        return (slurm or Slurm()).submit(path)


def worker_step(run: RunDir, job_id: str, nodes: int, per_node: int, srun_args: Sequence[str]) -> list[str]:
    """The srun of one such job. Pure. One worker that dies leaves the others working."""
    log = run.logs("worker")
    return [
        *("srun", "--mpi=none", f"--nodes={nodes}", f"--ntasks={nodes * per_node}", f"--ntasks-per-node={per_node}"),
        *("--cpu-bind=none", "--kill-on-bad-exit=0", "--export=ALL", "--unbuffered", "--open-mode=append"),
        *(f"--output={log / f'joined-{job_id}-%t.log'}", f"--task-epilog={log / 'task-epilog.sh'}"),
        *srun_args,
        *(sys.executable, "-m", "hpcrl.run.worker", "--run-dir", str(run.root), "--job", job_id),
    ]


def _work(run: RunDir) -> int:
    """Inside the job: workers on all its nodes until the run ends; the exit code."""
    check_joinable(run)
    config, job_id = load_config(run.config), os.environ["SLURM_JOB_ID"]
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    step = worker_step(run, job_id, nodes, config.worker.per_node, config.slurm.srun_args)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    print(f"joining {run.root} with {nodes} nodes", flush=True)
    code = subprocess.call(step, stdin=subprocess.DEVNULL, env={**os.environ, **threads, **config.slurm.env})
    if code != 0 and run.end.exists():
        print(f"the run has ended{_how(run)}", flush=True)
        return 0
    for path in sorted((run.failures / "joined").glob(f"*-j{job_id}-*.json")) if code else ():
        entry = json.loads(path.read_text(encoding="utf-8"))
        print(f"hpcrl: {entry['role']} on {entry['node']}: {entry['reason']}", file=sys.stderr, flush=True)
    return code


def main() -> None:
    """Entry point of slurm/workers.sh."""
    parser = argparse.ArgumentParser(prog="workers.sh", description="Workers for a run that is going on.")
    parser.add_argument("--run-dir", type=Path, required=True)
    run = RunDir(parser.parse_args().run_dir)
    try:
        raise SystemExit(_work(run))
    except RunOver as over:  # it waited in the queue longer than the run went on
        print(over, flush=True)
    except HpcrlError as error:
        print(f"hpcrl: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from error


if __name__ == "__main__":
    main()
