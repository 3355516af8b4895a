"""``hpcrl bench weights``: a development cluster with limited links, the ranks in one Slurm step, medians of what they measured.

this process   cluster up ─ links limited ─ model written ─ srun ranks.py ─ rank-N.json ─▶ one result ─ cluster down
"""

from __future__ import annotations

import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.bench.model import make_model
from hpcrl.devcluster import Cluster, ClusterLayout, NodeGroup
from hpcrl.devcluster.layout import MAX_NODES
from hpcrl.errors import InfraError, UserError

__all__ = ["WeightsBench", "summarise"]

Rows = list[dict[str, float]]

_BASE = Path("/var/tmp/hpcrl/bench")
_DTYPES = ("float32", "bfloat16", "float16")
_ALGORITHMS = ("auto", "star", "chain")
_RATE = re.compile(r"(?=.*[1-9])\d+(\.\d+)?(([kmgt]i?)?(bit|bps))?", re.IGNORECASE)
_PREFIXES = "source", "target"
"""Prefixes of the nodes: Slurm numbers ranks in the order of node names, and the trainers come first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsBench:
    """One measurement. ``link`` is a rate in tc's notation ("1gbit") or "none"; ``model`` replaces the generated one of ``nbytes``.
    Without ``engine`` only the way of the bytes is measured, without ``baselines`` neither gloo nor files.
    """

    nbytes: int
    dtype: str
    senders: int
    receivers: int
    link: str
    algorithm: str
    repeats: int
    cluster: str
    model: Path | None = None
    engine: bool = True
    threads: int = 1
    baselines: bool = True

    def run(self, progress: Callable[[str], None]) -> dict[str, Any]:
        """Measure; returns the result (see :func:`summarise`). Raises UserError, EnvironmentFault, InfraError."""
        self._check()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the cluster must not stay behind
        _BASE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_BASE) as name, self._cluster(progress) as cluster:
            directory = Path(name)
            model = self._model(directory, progress)
            self._prepare(directory, model)
            self._step(cluster, directory)
            ranks = [
                json.loads((directory / f"rank-{rank}.json").read_text(encoding="utf-8"))
                for rank in range(self.senders + self.receivers)
            ]
            nbytes = json.loads((directory / "size.json").read_text(encoding="utf-8"))
        held = [found["rows"][-1]["rss"] - found["idle"]["rss"] for found in ranks]
        for rank, more in enumerate(held):
            progress(f"rank {rank}: {more / 2**20:.0f} MiB more than before the first publish")
        for name, key, rows in _sizes(ranks, self.senders):
            progress(f"{name}, MiB after each publish: {', '.join(f'{row[key] / 2**20:.0f}' for row in rows)}")
        fixed = {"bytes": nbytes, "receivers": self.receivers, "senders": self.senders, "link": self.link}
        fixed |= {"algo": self.algorithm, "receiver_bytes": max(held[self.senders :])}
        return summarise([found["rows"] for found in ranks], self.senders) | fixed

    def _check(self) -> None:
        """What can be known before a cluster is there."""
        if min(self.senders, self.receivers, self.repeats, self.threads) < 1:
            raise UserError("--senders, --receivers, --threads and --repeat must be at least 1")
        for option, value, allowed in (("dtype", self.dtype, _DTYPES), ("algo", self.algorithm, _ALGORITHMS)):
            if value not in allowed:
                raise UserError(f"--{option} {value}: allowed are {', '.join(allowed)}")
        if self.senders + self.receivers > MAX_NODES:
            raise UserError(f"--senders and --receivers: at most {MAX_NODES} nodes together")
        if self.link != "none" and not _RATE.fullmatch(self.link):
            raise UserError(f"--link {self.link}: expected a rate as tc takes it (1gbit, 100mbit), or none")
        if self.model is not None and not (self.model / "model.safetensors").is_file():
            raise UserError(f"{self.model} holds no model.safetensors; give a Hugging Face model directory in one file")

    @contextmanager
    def _cluster(self, progress: Callable[[str], None]) -> Iterator[Cluster]:
        counts = (self.senders, self.receivers)
        groups = (NodeGroup(prefix=p, count=n, partition="bench") for p, n in zip(_PREFIXES, counts, strict=True))
        cluster = Cluster(self.cluster)
        if cluster.status().exists:
            raise UserError(
                f"cluster {self.cluster} exists; choose another --name, or end it: hpcrl devcluster down --name {self.cluster}"
            )
        try:
            cluster.up(ClusterLayout(name=self.cluster, nodes=tuple(groups)), progress=progress)
            cluster.limit_links(None if self.link == "none" else self.link)
            yield cluster
        finally:
            cluster.down()

    def _model(self, directory: Path, progress: Callable[[str], None]) -> Path:
        if self.model is None:
            progress(f"writing a model of {self.nbytes / 2**20:.0f} MiB")
            return make_model(directory / "model", self.nbytes, self.dtype)
        return self.model.resolve()

    def _prepare(self, directory: Path, model: Path) -> None:
        from safetensors import safe_open

        from hpcrl.weights.manifest import Layout

        with safe_open(str(model / "model.safetensors"), framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            shapes = [(name, self.dtype, part.get_shape()) for name, part in slices.items()]
        (directory / "size.json").write_text(json.dumps(Layout.of(shapes).nbytes), encoding="utf-8")
        plan = {
            "model": str(model),
            "dtype": self.dtype,
            "senders": self.senders,
            "receivers": self.receivers,
            "algorithm": self.algorithm,
            "repeats": self.repeats,
            "limited": self.link != "none",
            "engine": self.engine,
            "threads": self.threads,
            "baselines": self.baselines,
        }
        (directory / "plan.json").write_text(json.dumps(plan), encoding="utf-8")

    def _step(self, cluster: Cluster, directory: Path) -> None:
        ranks = str(self.senders + self.receivers)
        srun = ["srun", "-p", "bench", "-N", ranks, "-n", ranks, "--mpi=pmi2", "--kill-on-bad-exit=1", "--unbuffered"]
        python = [sys.executable, "-m", "mpi4py", "-m", "hpcrl.bench.ranks", str(directory)]
        argv, env = cluster.command([*srun, *python])
        env |= {
            "UCX_TLS": "tcp,self",  # by itself UCX would find the nodes' shared memory: they are one machine
            "MPIR_CVAR_NOLOCAL": "1",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(argv, env=env, stdout=sys.stderr, check=False)
        if done.returncode:
            raise InfraError("bench", f"the ranks ended with exit code {done.returncode}; their output is above")


def _sizes(ranks: list[dict[str, Any]], senders: int) -> Iterator[tuple[str, str, Rows]]:
    """Whose memory was looked at: (name, key, rounds)."""
    for rank, found in enumerate(ranks):
        yield f"rank {rank}", "rss", found["rows"]
    if "engine_rss" in ranks[senders]["rows"][0]:
        yield "engine", "engine_rss", ranks[senders]["rows"]


def summarise(ranks: list[Rows], senders: int) -> dict[str, float | None]:
    """Medians over the rounds after the first. A phase's time is that of the slowest rank that takes part in it.

    ``total_s`` runs from the call of publish to the last flip, ``rss_growth`` is the largest relative growth of a rank, or of the
    engine's processes together, from the first counted round to the last. What was not measured is None.
    """
    lead, serving = ranks[0], ranks[senders]
    counted = range(1, len(lead))

    def median(values: Callable[[int], float]) -> float:
        return round(statistics.median(values(number) for number in counted), 6)

    def slowest(key: str) -> float:
        return median(lambda number: max(rows[number][key] for rows in ranks[:senders]))

    def of(row: Rows, *keys: str) -> float | None:
        """Sum of what was measured under these keys."""
        return median(lambda number: sum(row[number][key] for key in keys)) if keys[0] in row[0] else None

    paused = of(serving, "file_pause_s")
    held = [[row["rss"] for row in rows] for rows in ranks]
    if "engine_rss" in serving[0]:
        held.append([row["engine_rss"] for row in serving])
    return {
        "raw_s": median(lambda n: lead[n]["raw"]),
        "transfer_verify_s": median(lambda n: lead[n]["transfer_verify_s"]),
        "total_s": median(lambda n: max(rows[n]["flipped"] for rows in ranks[senders:]) - lead[n]["began"]),
        "pause_s": of(serving, "pause_s"),
        "load_only_s": of(serving, "load_only_s"),
        "snapshot_s": slowest("snapshot_s"),
        "blocked_s": slowest("blocked_s"),
        "gloo_s": of(lead, "gloo"),
        "file_total_s": None if paused is None else of(lead, "write", "read"),
        "file_pause_s": paused,
        "rss_growth": round(max(sizes[-1] / sizes[1] - 1 for sizes in held), 4),
    }
