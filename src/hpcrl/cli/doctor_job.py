"""The doctor's short job: one component per partition, one task per node; what its nodes and its MPI world found.

login node                                        job
DIRECTORY with `stamp` (a thread), `lock` (held)   srun: bench/pairs.py over all components but the last of several, one MPI world
waits, at most _WAIT_S                             srun: doctor_node.py on every node
reads DIRECTORY/nodes/*.json, pairs.json.*
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpcrl.cli.doctor_checks import Fault
from hpcrl.cli.doctor_table import Finding, asked, merged
from hpcrl.config import load_config
from hpcrl.config.sections import SlurmSection
from hpcrl.launch.slurm import Slurm
from hpcrl.launch.steps import PMI2_ENVIRONMENT
from hpcrl.protocol.rundir import publish_text

__all__ = ["Place", "job_findings", "job_script"]

_START_S = 60.0
_RUN_S = 240.0
_MPI_S = 60
_SLOW_MB_S = 100.0
_SLOW_US = 5_000.0
"""A gigabit Ethernet does better; a good fabric is fifty times as fast."""
_NODES_S = 0.2


_DEFAULT = SlurmSection()


@dataclass(frozen=True, slots=True)
class Place:
    """A component of the job."""

    partition: str | None
    nodes: int


def roles(count: int) -> list[str]:
    """What the nodes of each component are asked: the last of several runs sandboxes, the one before serves.

    >>> roles(1), roles(2), roles(3)
    (['all'], ['inference', 'sandbox'], ['mpi', 'inference', 'sandbox'])
    """
    return ["all"] if count == 1 else [*["mpi"] * (count - 2), "inference", "sandbox"]


def job_script(
    folder: Path, places: Sequence[Place], config: Path | None = None, slurm: SlurmSection = _DEFAULT
) -> str:
    """The text for sbatch; steps get the MPI plugin, arguments and environment of ``slurm``, as those of a run do. Pure."""
    blocks = []
    for place in places:
        lines = [f"#SBATCH --nodes={place.nodes}", "#SBATCH --ntasks-per-node=1", "#SBATCH --time=6"]
        blocks.append("\n".join([*lines, *([f"#SBATCH --partition={place.partition}"] if place.partition else [])]))
    head = f"#SBATCH --job-name=hpcrl-doctor\n#SBATCH --output={folder}/job.out\n#SBATCH --no-requeue"
    python, given = shlex.quote(sys.executable), [str(config.resolve())] if config is not None else []
    total, several = sum(place.nodes for place in places), len(places) > 1
    probes, ranks = [], []
    for index, (place, role) in enumerate(zip(places, roles(len(places)), strict=True)):
        where = [f"--het-group={index}"] if several else []
        common = [
            *where,
            f"--nodes={place.nodes}",
            f"--ntasks={place.nodes}",
            "--ntasks-per-node=1",
            "--overlap",
            *slurm.srun_args,
        ]
        probe = [python, "-m", "hpcrl.cli.doctor_node", str(folder), role, str(total), *given]
        probes.append(shlex.join(["--mpi=none", *common, f"--output={folder}/probe-{index}-%t.log", *probe]))
        if role != "sandbox":
            command = [python, "-m", "mpi4py", "-m", "hpcrl.bench.pairs", str(folder / "pairs.json")]
            options = [f"--mpi={slurm.mpi}", "--kill-on-bad-exit=1", f"--output={folder}/mpi-{index}-%t.log"]
            ranks.append(shlex.join([*common, *options, *command]))
    env = {**(PMI2_ENVIRONMENT if slurm.mpi == "pmi2" else {}), **slurm.env}
    return "\n".join(
        [
            "#!/bin/bash",
            head,
            "\n#SBATCH hetjob\n".join(blocks),
            f"cd {shlex.quote(os.getcwd())}",
            "export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1",
            f"env {shlex.join(f'{key}={value}' for key, value in env.items())} timeout {_MPI_S} srun {' : '.join(ranks)}",
            f"srun {' : '.join(probes)}",
            "",
        ]
    )


@contextmanager
def _kept(folder: Path) -> Iterator[None]:
    """``stamp`` is replaced all the time, ``lock`` is held."""
    done = threading.Event()

    def stamp() -> None:
        while not done.is_set():
            publish_text(folder / "stamp", repr(time.time()))
            done.wait(_NODES_S)

    publish_text(folder / "stamp", repr(time.time()))
    thread = threading.Thread(target=stamp, daemon=True)
    with open(folder / "lock", "wb") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def job_findings(places: Sequence[Place], config: Path | None, slurm: Slurm | None = None) -> list[Finding]:
    """Submit, wait, read: rows of the table. The job is cancelled when it takes too long."""
    slurm = slurm or Slurm()
    section = load_config(config).slurm if config is not None else SlurmSection()
    with tempfile.TemporaryDirectory(prefix=".hpcrl-doctor-", dir=".") as name:
        folder = Path(name).resolve()
        for part in ("nodes", "ports", "done"):
            (folder / part).mkdir()
        script = folder / "job.sh"
        script.write_text(job_script(folder, places, config, section), encoding="utf-8")
        with _kept(folder):
            job = asked("a job over all partitions", lambda: _through(slurm, script, sum(p.nodes for p in places)))
        if job.state == "broken":
            return [job]
        nodes = {path.stem: [Finding(**row) for row in json.loads(path.read_text())] for path in sorted(_nodes(folder))}
        return [job, *_world_findings(folder, _ranks(places)), *merged(nodes)]


def _ranks(places: Sequence[Place]) -> int:
    return sum(place.nodes for place, role in zip(places, roles(len(places)), strict=True) if role != "sandbox")


def _nodes(folder: Path) -> list[Path]:
    return list((folder / "nodes").glob("[!.]*.json"))


def _through(slurm: Slurm, script: Path, nodes: int) -> str:
    """Until all nodes have answered."""
    job_id, began = slurm.submit(script), time.monotonic()
    started: float | None = None
    folder = script.parent
    try:
        while len(_nodes(folder)) < nodes:
            states = set(slurm.states([job_id]).values())
            if started is None and states & {"RUNNING", "COMPLETING", "COMPLETED", "FAILED"}:
                started = time.monotonic()
            if started is None and time.monotonic() - began > _START_S:
                raise Fault(
                    f"job {job_id} does not start within {_START_S:.0f} s",
                    "squeue --start says when; give --partition or --nodes that are free now",
                    "user",
                )
            over = states and not states & {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}
            if (over and len(_nodes(folder)) < nodes) or time.monotonic() - (started or began) > _RUN_S:
                said = " ".join(_said(folder).split())[-300:]
                raise Fault(
                    f"{len(_nodes(folder))} of {nodes} nodes answered (job {job_id}: {', '.join(sorted(states))}): {said}",
                    "look at slurmd's log on the others",
                    "admin",
                )
            time.sleep(_NODES_S)
    finally:
        slurm.cancel(job_id)
    answered = time.monotonic() - (started or began)
    return f"{_count(nodes, 'node')} started in {(started or began) - began:.0f} s, answered in {answered:.0f} s"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _said(folder: Path) -> str:
    logs = [folder / "job.out", *sorted(folder.glob("probe-*.log"))]
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in logs if path.exists())


def _world_findings(folder: Path, expected: int) -> list[Finding]:
    """Of the MPI step: did all ranks find one another, and how fast are they."""
    found = asked("MPI world", lambda: _world(folder, expected))
    return [found] if found.state == "broken" else [found, asked("MPI between nodes", lambda: _links(folder))]


def _world(folder: Path, expected: int) -> str:
    told = folder / "pairs.json"
    if told.exists():
        raise Fault(
            json.loads(told.read_text())["fault"],
            "mpi4py's library and srun --mpi must speak the same PMI: docs/cluster.md, Which MPI",
            "user",
        )
    came = len(list(folder.glob("pairs.json.*")))
    if came < expected:
        logs = [folder / "job.out", *sorted(folder.glob("mpi-*.log"))]
        said = " ".join("\n".join(path.read_text(errors="replace") for path in logs if path.exists()).split())[-300:]
        raise Fault(
            f"{came} of {expected} ranks came through: {said or f'nothing within {_MPI_S} s'}",
            "docs/cluster.md, Which MPI; UCX_TLS=tcp,self or FI_PROVIDER=tcp in slurm.env rules the fabric out",
            "user",
        )
    return f"{_count(expected, 'rank')} over all components of the step"


def _links(folder: Path) -> str:
    rows = [row for path in folder.glob("pairs.json.*") for row in json.loads(path.read_text())["pairs"]]
    if not rows:
        return "one node: nothing to measure"
    slowest, farthest = min(rows, key=lambda row: row["mb_s"]), max(rows, key=lambda row: row["latency_us"])
    said = f"{len(rows)} pairs, at worst {slowest['mb_s']:.0f} MB/s ({slowest['a']}–{slowest['b']})"
    said += f" and {farthest['latency_us']:.0f} µs ({farthest['a']}–{farthest['b']})"
    if slowest["mb_s"] < _SLOW_MB_S or farthest["latency_us"] > _SLOW_US:
        raise Fault(
            said,
            "is the fast network used? UCX_NET_DEVICES, FI_PROVIDER in slurm.env; look at the link",
            "admin",
            slow=True,
        )
    return said
