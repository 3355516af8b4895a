"""``hpcrl bench life``: how long a run stands still when a part of it dies, and whether it always comes back or goes away whole.

    rank         a trainer rank, then an inference rank, is killed: until the next trained step (real vLLM)
    worker       the only worker is killed: until the next shard of its successor is sealed
    coordinator  the coordinator is killed: until the second trained step after it
    requeue      the signal that precedes the time limit, in one job again and again: saved, requeued, resumed, trained on
    scancel      at a random moment, of a start and of training in turn: what is left on any node ten seconds later
    doctor       ``hpcrl doctor`` on this cluster
    planted      how many of the faults of `hpcrl.bench.planted` the doctor names, each planted once whatever ``rounds`` says

Runs are the quickstart's with few steps, on a development cluster that is started for it (needs root). All parts but ``rank`` put
`hpcrl.bench.stand_in` in the engine's place. Idle times are the longest of all rounds.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hpcrl.bench.life_jobs import LifeCluster, LifeJob
from hpcrl.bench.planted import FAULTS, name_all
from hpcrl.errors import RunError

__all__ = ["PARTS", "measure"]

Say = Callable[[str], None]

_ENDLESS = 100_000
_GONE_S = 10.0
_NO_LIMIT = ("slurm.requeues=1000", "run.restarts=1000")
"""As many rounds as one likes."""


def measure(
    say: Say, only: str | None = None, rounds: int = 3, name: str = "hpcrl-life"
) -> dict[str, float | int | None]:
    """Numbers by key (seconds, or counts of rounds or faults); None for parts that were left out. ``rounds``: of each part."""
    numbers: dict[str, float | int | None] = dict.fromkeys(key for key, _ in PARTS.values())
    with tempfile.TemporaryDirectory(prefix="hpcrl-life-", dir="/var/tmp") as folder:
        cluster = LifeCluster(name, Path(folder))
        Path(folder).chmod(0o711)  # run by root, sandboxes are another user's
        cluster.up()
        try:
            for part in [only] if only is not None else PARTS:
                key, work = PARTS[part]
                numbers[key] = work(cluster, rounds, say)
                say(f"{key}: {numbers[key]}")
        finally:
            cluster.cluster.down()
    return numbers


def _rank(cluster: LifeCluster, rounds: int, say: Say) -> float:
    job = _training(cluster, stand_in=False)
    worst = 0.0
    for turn in range(rounds):
        role = ("trainer", "inference")[turn % 2]
        restarts = job.text().count("starting mpi again")
        job.kill(f"hpcrl.run.{role}")
        dying = job.until(lambda before=restarts: job.text().count("starting mpi again") > before, "restart")  # type: ignore[misc]
        seconds = dying + job.more_steps()
        say(f"{role} rank killed: trained again after {seconds:.1f} s")
        worst = max(worst, seconds)
        job.more_steps(2)
    _end(job)
    return worst


def _worker(cluster: LifeCluster, rounds: int, say: Say) -> float:
    """Attempts take half a second here: the next shard that is sealed holds some that were leased soon before."""
    job = _training(cluster, *_NO_LIMIT)
    worst = 0.0
    for _ in range(rounds):
        job.kill("hpcrl.run.worker")
        killed = time.time()
        seconds = job.until(lambda since=killed: _sealed_after(job, since), "shard of another worker")  # type: ignore[misc]
        say(f"worker killed: the next shard was sealed after {seconds:.1f} s")
        worst = max(worst, seconds)
        job.more_steps(2)
    _end(job)
    return worst


def _sealed_after(job: LifeJob, since: float) -> bool:
    """A shard was sealed later than the dying worker could."""
    return any(path.stat().st_mtime > since + _STILL_S for path in job.run.shards.glob("*.h5"))


_STILL_S = 0.1


def _coordinator(cluster: LifeCluster, rounds: int, say: Say) -> float:
    """The trainer may hold one batch already; the second step shows that everybody goes on."""
    job = _training(cluster, *_NO_LIMIT)
    worst = 0.0
    for _ in range(rounds):
        job.kill("hpcrl.run.coordinator")
        seconds = job.more_steps(2)
        say(f"coordinator killed: two more steps after {seconds:.1f} s")
        worst = max(worst, seconds)
    _end(job)
    return worst


def _requeue(cluster: LifeCluster, rounds: int, say: Say) -> int:
    """One job through all rounds: its run must know each of them, and end with every trajectory trained once."""
    job = _training(cluster, *_NO_LIMIT)
    good = 0
    for turn in range(rounds):
        began, lines = time.monotonic(), job.text().count("back into the queue")
        cluster.slurm("scancel", "--batch", "--signal=USR1", job.job_id)
        try:
            job.until(lambda before=lines: job.text().count("back into the queue") > before, "requeue", dies=True)  # type: ignore[misc]
            state = job.end().get("state")
            job.soon_again()
            job.more_steps()
        except RunError as error:
            say(f"round {turn + 1}: {error}")
            break
        once = job.text().count("back into the queue") == lines + 1
        good += state == "timeout" and once
        say(f"round {turn + 1}: state {state}, trained again {time.monotonic() - began:.1f} s after the signal")
    _end(job)
    return good


def _scancel(cluster: LifeCluster, rounds: int, say: Say) -> int:
    chance, leftovers = random.Random(0), 0
    for turn in range(rounds):
        job = cluster.submit(_ENDLESS, stand_in=True)
        job.until(lambda: "run directory" in job.text(), "start")  # noqa: B023 - used at once
        if turn % 2:
            job.until(lambda: job.steps() >= 1, "first step")  # noqa: B023 - used at once
        time.sleep(chance.uniform(0.0, 20.0))
        steps, left = job.steps(), _cancel(job)
        leftovers += bool(left)
        say(f"round {turn + 1}: cancelled after step {steps}; " + (f"left: {left}" if left else "nothing left"))
    return leftovers


def _cancel(job: LifeJob) -> list[str]:
    """What is left ``_GONE_S`` after scancel."""
    job.cluster.slurm("scancel", job.job_id)
    deadline = time.monotonic() + _GONE_S
    while (left := job.cluster.left(job.run)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def _doctor(cluster: LifeCluster, rounds: int, say: Say) -> float:
    env = {**os.environ, **cluster.cluster.env()}
    argv = [str(Path(sys.executable).with_name("hpcrl")), "doctor"]
    worst = 0.0
    for _ in range(rounds):
        began = time.monotonic()
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600, check=False)
        worst = max(worst, time.monotonic() - began)
        say(f"doctor: exit code {done.returncode}, {time.monotonic() - began:.1f} s")
    return worst


def _planted(cluster: LifeCluster, _: int, say: Say) -> int:
    named = name_all(cluster.cluster, cluster.folder, say)
    say(f"planted faults named: {named} of {len(FAULTS)}")
    return named


def _training(cluster: LifeCluster, *sets: str, stand_in: bool = True) -> LifeJob:
    """A run that has trained its first steps."""
    job = cluster.submit(_ENDLESS, *sets, stand_in=stand_in)
    job.until(lambda: job.steps() >= 2, "second step")
    return job


def _end(job: LifeJob) -> None:
    job.cluster.slurm("scancel", job.job_id)
    job.until(job.over, "end", timeout_s=60, dies=True)


PARTS: dict[str, tuple[str, Callable[[LifeCluster, int, Say], float | int]]] = {
    "rank": ("rank_restart_s", _rank),
    "worker": ("worker_idle_s", _worker),
    "coordinator": ("coordinator_idle_s", _coordinator),
    "requeue": ("requeue_ok", _requeue),
    "scancel": ("scancel_leftovers", _scancel),
    "doctor": ("doctor_s", _doctor),
    "planted": ("planted_named", _planted),
}
"""Part → key, work."""
