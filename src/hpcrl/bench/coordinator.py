"""``hpcrl bench coordinator``: the real coordinator process under 64 connections, empty and with a million finished rollouts.

    fresh run directory ─► coordinator ─► batched load ─► unbatched load ─► heartbeats of 10,000 attempts ─► stop
    the same, filled    ─► time to serving ─► batched load (slowdown) ─► resident memory ─► stop
    agent-lightning's in-memory store, where it is installed: the same number of rollouts through its calls

Every answer of the coordinator is durable (one fsync per group commit); agent-lightning's store is in memory. The load runs in this
process, so that on a machine of two cores the coordinator has about one of them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcrl.bench.coordinator_fill import fill
from hpcrl.bench.coordinator_load import Load, Measured, heartbeats
from hpcrl.bench.peer_store import agentlightning_rate
from hpcrl.config import dump_config, parse_config
from hpcrl.coordinator.database import open_database
from hpcrl.errors import RunError
from hpcrl.protocol.client import wait_for_endpoint
from hpcrl.protocol.keyfiles import issue_keys
from hpcrl.protocol.rundir import RunDir, publish_text

__all__ = ["measure"]

GROUP_SIZE = 8
GROUPS_PER_STEP = 32
FINISHED = 1_000_000
PACED_RATE = 2_000.0
"""Rollouts per second during the measurement of lease latency: at saturation 64 callers only measure their own queue."""
_TASKS = 100
_START_S = 120.0


def measure(quick: bool, say: Callable[[str], None]) -> dict[str, float | None]:
    """All numbers of the bench. ``quick``: seconds instead of minutes, with a small database (to see that it works)."""
    seconds, finished, beats_s = (6.0, 8_000, 5.0) if quick else (20.0, FINISHED, 30.0)
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as folder:
        empty = new_run(Path(folder) / "empty")
        with serving(empty) as process:
            load = Load(empty)
            asyncio.run(load.begin())
            batched = _loaded(load, process, seconds, 32, say)
            paced = _loaded(load, process, seconds, 32, say, rate=PACED_RATE)
            fsyncs = _fsync_ms(Path(folder))
            say(f"fdatasync of 128 KiB here: median {fsyncs[len(fsyncs) // 2]:.1f} ms, p99 {_p99(fsyncs):.1f} ms")
            single = _loaded(load, process, seconds, 1, say)
            share = asyncio.run(heartbeats(empty, lambda: _cpu_s(process.pid), beats_s))
            say(f"heartbeats of 10,000 attempts: {share:.1%} of a core")
        full = new_run(Path(folder) / "full")
        say(f"filling a database with {finished} finished rollouts")
        connection = open_database(full.database)
        fill(connection, finished, GROUP_SIZE, GROUPS_PER_STEP)
        connection.close()
        started = time.monotonic()
        with serving(full) as process:
            restart_s = time.monotonic() - started
            say(f"serving after {restart_s:.2f} s")
            load = Load(full)
            asyncio.run(load.begin(finished // (GROUP_SIZE * GROUPS_PER_STEP)))
            later = _loaded(load, process, seconds, 32, say)
            rss_mib = _peak_rss_mib(process.pid)
    peer = agentlightning_rate(2_000 if quick else 20_000)
    return {
        "rollouts_per_s_batched": batched.rollouts_per_s,
        "rollouts_per_s_unbatched": single.rollouts_per_s,
        "lease_p99_ms": paced.lease_p99_ms,
        "slowdown_1m": batched.rollouts_per_s / later.rollouts_per_s,
        "heartbeat_core_share": share,
        "rss_mib_1m": rss_mib,
        "restart_s_1m": restart_s,
        "agentlightning_per_s": peer,
        "finished_rollouts": finished,
        "lease_p99_ms_saturated": max(batched.lease_p99_ms, single.lease_p99_ms),
        "rollouts_per_s_paced": paced.rollouts_per_s,
        "fsync_p50_ms": fsyncs[len(fsyncs) // 2],
        "fsync_p99_ms": _p99(fsyncs),
        "cpu_ms_per_rollout_batched": batched.cpu_ms_per_rollout,
        "cpu_ms_per_rollout_unbatched": single.cpu_ms_per_rollout,
        "cpu_slowdown_1m": later.cpu_ms_per_rollout / batched.cpu_ms_per_rollout,
    }


def new_run(root: Path) -> RunDir:
    """A run directory for a coordinator whose admission never closes: the load alone bounds what is under way."""
    for index in range(_TASKS):
        (root / "tasks" / f"task-{index:03d}").mkdir(parents=True)
    run = RunDir(root / "run")
    run.create()
    issue_keys(run)
    config = parse_config(
        {
            "model": {"path": "unused"},
            "tasks": {"train": str(root / "tasks")},
            "rollout": {"group_size": GROUP_SIZE},
            "staleness": {"max_policy_lag": 10_000_000},
            "trainer": {"steps": 10_000_000, "groups_per_step": GROUPS_PER_STEP},
        }
    )
    publish_text(run.config, dump_config(config))
    return run


@contextmanager
def serving(run: RunDir) -> Iterator[subprocess.Popen[bytes]]:
    """The coordinator process of ``run`` while it answers; ended by SIGTERM."""
    (run.endpoints / "coordinator").unlink(missing_ok=True)
    command = [sys.executable, "-m", "hpcrl.run.coordinator", "--run-dir", str(run.root)]
    with open(run.root / "coordinator.log", "ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for_endpoint(run, "coordinator", _START_S, lambda: process.poll() is None)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    if process.wait(60) != 0:
        raise RunError(f"the coordinator ended with code {process.returncode}: see {run.root / 'coordinator.log'}")


def _loaded(
    load: Load,
    process: subprocess.Popen[bytes],
    seconds: float,
    size: int,
    say: Callable[[str], None],
    rate: float | None = None,
) -> Measured:
    measured = asyncio.run(load.drive(seconds, size, lambda: _cpu_s(process.pid), rate))
    limit = "" if rate is None else f", at most {rate:.0f}/s"
    say(
        f"calls of {size}{limit}: {measured.rollouts_per_s:.0f} rollouts/s, lease p99 {measured.lease_p99_ms:.1f} ms, "
        f"{measured.cpu_ms_per_rollout:.2f} ms of CPU per rollout"
    )
    return measured


def _fsync_ms(folder: Path) -> list[float]:
    """Milliseconds of each of many appends made durable, sorted: what one commit costs on this disk without any database."""
    block, taken = os.urandom(1 << 17), []
    with open(folder / "fsync.probe", "wb", buffering=0) as file:
        for _ in range(200):
            file.write(block)
            started = time.perf_counter()
            os.fdatasync(file.fileno())
            taken.append(1000 * (time.perf_counter() - started))
    return sorted(taken)


def _p99(ordered: list[float]) -> float:
    return ordered[int(len(ordered) * 0.99)]


def _cpu_s(pid: int) -> float:
    """User and system seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_rss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
