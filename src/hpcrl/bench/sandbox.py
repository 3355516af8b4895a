"""``hpcrl bench sandbox``: sandboxes against plain ``apptainer exec`` of the same image with the same options, in one run.

    start      plain exec until a shell answers, then ours until it takes commands; in turn       start_ratio
    pool       four attempts at once for half a second each, one leased as another ends           pool_start_ms_p50
    commands   `true` and a 1 KiB echo, less the same commands started inside without a server    command_overhead_ms_p50, _p99
    files      10 MiB written and read back                                                       file_mb_s, the slower of both
    scoring    plain exec of a one-line test.sh until its reward is read, then ours; in turn      scoring_ratio
    crowd      64 attempts at once: commands, files, artifact                                     failures_64
    row        2,000 attempts one after the other                                                 leftovers, rss_growth

A ratio is one of medians. The commands' numbers are medians of nine rounds, each 200 commands of both kinds after 200 bare ones; the
median of those is taken off. ``leftovers`` counts processes, mounts and directories, before the pool ends (less what a sandbox waiting
there had at the beginning, for each) and after; ``rss_growth`` is that of this process from a quarter of the row to its end.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shlex
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.bench.sandbox_raw import BARE, Raw
from hpcrl.errors import HpcrlError, RunError
from hpcrl.sandbox.base import Sandbox, SandboxSpec
from hpcrl.sandbox.images import Image, resolve
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.pool import SandboxPool
from hpcrl.sandbox.procs import descendants
from hpcrl.sandbox.trees import remove_tree
from hpcrl.scoring.private import load_private
from hpcrl.scoring.runner import score

__all__ = ["PARTS", "TARGETS", "markdown", "measure"]

Say = Callable[[str], None]
Numbers = dict[str, float | None]

_MIB = 1024 * 1024
_SLOTS = 4
_CROWD = 64

TARGETS: tuple[tuple[str, str, float, bool, str], ...] = (
    ("start without pool / plain exec", "start_ratio", 1.15, True, "×"),
    ("start with warm pool, p50", "pool_start_ms_p50", 5.0, True, "ms"),
    ("command overhead, p50", "command_overhead_ms_p50", 2.0, True, "ms"),
    ("command overhead, p99", "command_overhead_ms_p99", 6.0, True, "ms"),
    ("10 MiB in and out, the slower", "file_mb_s", 300.0, False, "MB/s"),
    ("scoring, start to reward / plain exec", "scoring_ratio", 1.25, True, "×"),
    ("64 at once: failures", "failures_64", 0.0, True, ""),
    ("in a row: leftovers", "leftovers", 0.0, True, ""),
    ("in a row: growth of memory", "rss_growth", 0.02, True, ""),
)
"""Measure, key, bound, whether it is an upper one, unit."""


@dataclass(slots=True)
class _Bench:
    image: Image
    folder: Path
    """Passable to everybody; holds scratch/, task/ and what the plain containers use."""
    say: Say
    rounds: int
    quick: bool

    @asynccontextmanager
    async def pool(self, warm: int = 0, starts: int = 2) -> AsyncIterator[SandboxPool]:
        scratch = self.folder / "scratch"
        async with SandboxPool(backend="apptainer", start_concurrency=starts, warm=warm, scratch=scratch) as pool:
            yield pool

    def spec(self) -> SandboxSpec:
        return SandboxSpec(image=self.image.path, files=(self.folder / "task" / "environment" / "files",))

    def some(self, many: int, few: int) -> int:
        return few if self.quick else many


def measure(
    quick: bool, say: Say, only: str | None = None, rounds: int | None = None, image: str = "containers/sandbox.def"
) -> Numbers:
    """The numbers of the bench, or of one of its ``PARTS``. ``rounds``: attempts of the row (2,000). Raises as resolve; RunError."""
    found = resolve(image)
    with _folder() as folder:
        bench = _Bench(found, folder, say, rounds or (20 if quick else 2000), quick)
        numbers: Numbers = {}
        for name, part in PARTS.items():
            if only in (None, name):
                say(f"{name} …")
                numbers |= asyncio.run(part(bench))
        return numbers


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="hpcrl-bench-"))
    try:
        # Run by root, sandboxes are user nobody, who must pass.
        os.chmod(folder, 0o711)
        task = folder / "task"
        (task / "environment" / "files").mkdir(parents=True)
        (task / "environment" / "files" / "sol.py").write_text("print(1)\n")
        (task / "tests").mkdir()
        (task / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
        (task / "instruction.md").write_text("Nothing to do.\n")
        (task / "task.toml").write_text('version = "1.0"\n')
        yield folder
    finally:
        remove_tree(folder)


async def _start(bench: _Bench) -> Numbers:
    raw = Raw(bench.image.path, _sub(bench, "raw-start"), bench.folder / "task" / "tests")
    plain, ours = [], []
    async with bench.pool() as pool:
        for _ in range(bench.some(30, 5)):
            plain.append(raw.start())
            began = time.perf_counter()
            async with pool.sandbox(bench.spec()):
                ours.append(time.perf_counter() - began)
    return {
        "start_ratio": statistics.median(ours[1:]) / statistics.median(plain[1:]),
        "start_ms_p50": 1e3 * statistics.median(ours[1:]),
        "raw_start_ms_p50": 1e3 * statistics.median(plain[1:]),
    }


async def _pool(bench: _Bench) -> Numbers:
    starts: list[float] = []
    each = bench.some(40, 4)
    async with bench.pool(warm=8) as pool:

        async def slot(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(each):
                began = time.perf_counter()
                async with pool.sandbox(bench.spec()) as sandbox:
                    starts.append(1e3 * (time.perf_counter() - began))
                    await sandbox.run(f"sleep {chance.uniform(0.3, 0.7):.3f}")

        await asyncio.gather(*(slot(seed) for seed in range(_SLOTS)))
        hits = pool.taken / len(starts)
    p50, p99 = _p50_p99(starts)
    return {"pool_start_ms_p50": p50, "pool_start_ms_p99": p99, "pool_hits": hits}


async def _commands(bench: _Bench) -> Numbers:
    each = bench.some(100, 10)
    rounds: list[tuple[float, float]] = []
    bare_all: list[float] = []
    worst = 0.0
    async with bench.pool() as pool, pool.sandbox(bench.spec()) as sandbox:
        await sandbox.write("bare.py", BARE.encode())
        for _ in range(bench.some(9, 3)):
            over: list[float] = []
            for command in ("true", "echo " + 1023 * "x"):
                bare = json.loads(await _output(sandbox, f"python3 bare.py {each} {shlex.quote(command)}"))
                bare_all += bare
                for _ in range(each):
                    began = time.perf_counter()
                    await sandbox.run(command)
                    over.append(1e3 * (time.perf_counter() - began) - statistics.median(bare))
            rounds.append(_p50_p99(over))
            worst = max(worst, *over)
    p50, p99 = (statistics.median(values) for values in zip(*rounds, strict=True))
    bare_p50, bare_p99 = _p50_p99(bare_all)
    return {
        "command_overhead_ms_p50": p50,
        "command_overhead_ms_p99": p99,
        "command_overhead_ms_max": worst,
        "bare_ms_p50": bare_p50,
        "bare_ms_p99": bare_p99,
    }


async def _files(bench: _Bench) -> Numbers:
    content = random.Random(0).randbytes(10 * _MIB)
    into, out = [], []
    async with bench.pool() as pool, pool.sandbox(bench.spec()) as sandbox:
        for _ in range(bench.some(21, 3)):
            began = time.perf_counter()
            await sandbox.write("large", content)
            written = time.perf_counter()
            back = await sandbox.read("large", len(content))
            out.append(time.perf_counter() - written)
            into.append(written - began)
            if back != content:
                raise RunError("bench: a file came back changed")
    size = len(content) / 1e6
    written_mb_s, read_mb_s = size / statistics.median(into), size / statistics.median(out)
    return {
        "file_mb_s": min(written_mb_s, read_mb_s),
        "file_in_mb_s": written_mb_s,
        "file_out_mb_s": read_mb_s,
    }


async def _scoring(bench: _Bench) -> Numbers:
    raw = Raw(bench.image.path, _sub(bench, "raw-scoring"), bench.folder / "task" / "tests")
    task, limits = load_private(bench.folder / "task"), Limits()
    async with bench.pool() as pool:
        async with pool.sandbox(bench.spec()) as sandbox:
            artifact = await sandbox.artifact()
        plain, ours = [], []
        for _ in range(bench.some(30, 5)):
            plain.append(raw.score())
            result = await score(task, artifact, bench.image, limits, pool)
            if result.reward != 1.0:
                raise RunError(f"bench: the tests gave {result}")
            ours.append(result.duration_s)
    return {
        "scoring_ratio": statistics.median(ours[1:]) / statistics.median(plain[1:]),
        "scoring_ms_p50": 1e3 * statistics.median(ours[1:]),
        "raw_scoring_ms_p50": 1e3 * statistics.median(plain[1:]),
    }


async def _crowd(bench: _Bench) -> Numbers:
    async with bench.pool(warm=8, starts=4) as pool:

        async def attempt(number: int) -> bool:
            try:
                async with pool.sandbox(bench.spec()) as sandbox:
                    for command in range(5):
                        if await _output(sandbox, f"echo {number} {command} | tee -a log") != f"{number} {command}\n":
                            return False
                    ended = (await sandbox.read("log")).count(b"\n")
                    return ended == 5 and b"log" in await sandbox.artifact()
            except HpcrlError as error:
                bench.say(f"attempt {number}: {error}")
                return False

        began = time.perf_counter()
        results = await asyncio.gather(*(attempt(number) for number in range(_CROWD)))
    return {"failures_64": float(results.count(False)), "crowd_s": time.perf_counter() - began}


async def _row(bench: _Bench) -> Numbers:
    memory: list[int] = []
    began = time.perf_counter()
    async with bench.pool(warm=8) as pool:
        await asyncio.sleep(0.3)  # its guard has started
        empty = _present(bench)
        for number in range(bench.rounds):
            async with pool.sandbox(bench.spec()) as sandbox:
                if await _output(sandbox, f"echo {number} | tee log") != f"{number}\n":
                    raise RunError(f"bench: attempt {number} of the row printed something else")
                await sandbox.artifact()
            memory.append(_resident())
            if number == 0:
                waiting, present = await _settled(bench, pool)
                each = {name: (present[name] - empty[name]) // waiting for name in empty}
            elif number % 250 == 0:
                bench.say(
                    f"row {number}: {memory[-1] // _MIB} MiB, {(time.perf_counter() - began) / number * 1e3:.0f} ms each"
                )
        waiting, after = await _settled(bench, pool)
        took = time.perf_counter() - began
    ended = _present(bench)
    ended["directories"] -= 1  # the scratch directory itself
    left = {n: abs(after[n] - empty[n] - waiting * each[n]) + abs(ended[n]) for n in ended}
    return {
        "leftovers": float(sum(left.values())),
        "waiting": float(waiting),
        **{f"leftover_{name}": float(number) for name, number in left.items()},
        "rss_growth": memory[-1] / memory[len(memory) // 4] - 1,
        "row_attempt_ms": 1e3 * took / bench.rounds,
    }


async def _settled(bench: _Bench, pool: SandboxPool) -> tuple[int, dict[str, int]]:
    """How many sandboxes wait for the next attempts, and what is there, once nothing is on its way any more."""
    deadline = time.monotonic() + 60
    seen: list[tuple[int, dict[str, int]]] = []
    while len(seen) < 3 or seen[-1][0] == 0 or not seen[-1] == seen[-2] == seen[-3]:
        if time.monotonic() > deadline:
            raise RunError(f"bench: sandboxes started ahead come and go: {seen[-3:]}")
        await asyncio.sleep(0.3)
        seen.append((pool.ready(), _present(bench)))
    return seen[-1]


def _present(bench: _Bench) -> dict[str, int]:
    """Processes below this one or in a container of ours, mounts of this process, entries below the scratch directory."""
    scratch = bench.folder / "scratch"
    processes = set(descendants(os.getpid()))
    marker = str(scratch).encode()
    mounts = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            lines = Path(f"/proc/{name}/mountinfo").read_bytes().count(marker)
        except OSError:
            continue
        if int(name) == os.getpid():
            mounts = lines
        elif lines:
            processes.add(int(name))
    return {
        "processes": len(processes),
        "mounts": mounts,
        "directories": sum(1 + len(folders) for _, folders, _ in os.walk(scratch)),
    }


def _sub(bench: _Bench, name: str) -> Path:
    folder = bench.folder / name
    folder.mkdir(mode=0o711)
    return folder


async def _output(sandbox: Sandbox, command: str) -> str:
    return (await sandbox.run(command)).output


def _resident() -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _p50_p99(values: list[float]) -> tuple[float, float]:
    return statistics.median(values), sorted(values)[max(0, int(0.99 * len(values)) - 1)]


PARTS: dict[str, Callable[[_Bench], Coroutine[Any, Any, Numbers]]] = {
    "start": _start,
    "pool": _pool,
    "commands": _commands,
    "files": _files,
    "scoring": _scoring,
    "crowd": _crowd,
    "row": _row,
}
"""What can be measured alone."""


def markdown(numbers: Numbers) -> list[str]:
    """Asked and measured, one line per target; "–" where a part was not run."""
    lines = ["| measure | asked | measured | reached |", "|---|---|---|---|"]
    for measure_, key, bound, upper, unit in TARGETS:
        value = numbers.get(key)
        shown = "–" if value is None else f"{value:.4g} {unit}".strip()
        reached = "–" if value is None else "yes" if (value <= bound if upper else value >= bound) else "no"
        lines.append(f"| {measure_} | {'≤' if upper else '≥'} {f'{bound:g} {unit}'.strip()} | {shown} | {reached} |")
    return lines
