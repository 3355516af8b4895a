"""``hpcrl bench weights --table``: every target of publishing weights, asked and measured, from one series of benchmark runs.

RUNS     what is measured (options of WeightsBench)  ─▶ one result each
TARGETS  what is asked of the results                ─▶ one line each

A line compares numbers of one run, or of two runs of the same size: the machine's speed cancels out of most of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.bench.weights import WeightsBench

__all__ = ["RUNS", "TARGETS", "Target", "markdown", "run_all"]

Results = Mapping[str, Mapping[str, Any]]

_MIB = 1 << 20

RUNS: dict[str, dict[str, Any]] = {
    "1 GiB": {"nbytes": 1 << 30, "engine": False, "baselines": False},
    "1 to 1": {"nbytes": 256 * _MIB, "link": "1gbit", "engine": False, "baselines": False},
    "1 to 4": {"nbytes": 256 * _MIB, "link": "1gbit", "receivers": 4, "engine": False},
    "1 to 4, served": {"nbytes": 256 * _MIB, "link": "1gbit", "receivers": 4},
    "1 Gbit/s": {"nbytes": 64 * _MIB, "link": "1gbit", "baselines": False},
    "100 Mbit/s": {"nbytes": 64 * _MIB, "link": "100mbit", "baselines": False},
    "SmolLM2": {"nbytes": 0, "threads": 2, "link": "1gbit", "baselines": False},
    "50 publishes": {"nbytes": 64 * _MIB, "repeats": 50, "baselines": False},
}
"""Options that differ from one sender, one receiver, no limit of the links, bf16. Where links are measured no engine takes a core."""


@dataclass(frozen=True, slots=True)
class Target:
    """``value(results)`` shall be at most ``limit`` (``least``: at least). ``runs`` are those that it needs; ``form`` shows it."""

    what: str
    runs: tuple[str, ...]
    value: Callable[[Results], float]
    limit: float
    least: bool = False
    form: str = "{:.2f} ×"

    @property
    def asked(self) -> str:
        return f"{'≥' if self.least else '≤'} {self.form.format(self.limit)}"

    def line(self, results: Results) -> str:
        value = self.value(results)
        met = value >= self.limit if self.least else value <= self.limit
        return f"| {self.what} | {self.asked} | {self.form.format(value)} | {'yes' if met else 'no'} |"


def _ratio(run: str, over: str, under: str) -> Callable[[Results], float]:
    return lambda results: results[run][over] / results[run][under]


def _pause(run: str) -> Target:
    """The pause against what any update of this engine costs: 60 ms more than 1.25 times that."""

    def value(results: Results) -> float:
        return (results[run]["pause_s"] - 0.06) / results[run]["load_only_s"]

    return Target(f"pause of generation, {run}: (pause − 60 ms) / load only", (run,), value, 1.25)


def _pause_by_rate(results: Results) -> float:
    return results["100 Mbit/s"]["pause_s"] / results["1 Gbit/s"]["pause_s"]


def _more_than_two_copies(results: Results) -> float:
    found = results["1 GiB"]
    return (found["receiver_bytes"] - 2 * found["bytes"]) / _MIB


TARGETS: tuple[Target, ...] = (
    Target(
        "1 → 1, 1 GiB, no limit: transfer + verify / raw",
        ("1 GiB",),
        _ratio("1 GiB", "transfer_verify_s", "raw_s"),
        1.25,
    ),
    Target(
        "1 → 1, 256 MiB, 1 Gbit/s: transfer + verify / raw",
        ("1 to 1",),
        _ratio("1 to 1", "transfer_verify_s", "raw_s"),
        1.05,
    ),
    Target(
        "1 → 4, 256 MiB, 1 Gbit/s: transfer + verify / (M/B)",
        ("1 to 4",),
        _ratio("1 to 4", "transfer_verify_s", "raw_s"),
        1.20,
    ),
    Target("the same: gloo broadcast / ours", ("1 to 4",), _ratio("1 to 4", "gloo_s", "transfer_verify_s"), 1.7, True),
    Target(
        "the same with an engine: pause of file + reload / our pause",
        ("1 to 4, served",),
        _ratio("1 to 4, served", "file_pause_s", "pause_s"),
        2.0,
        True,
    ),
    _pause("1 Gbit/s"),
    _pause("100 Mbit/s"),
    _pause("SmolLM2"),
    Target("pause at 100 Mbit/s / at 1 Gbit/s, at most", ("1 Gbit/s", "100 Mbit/s"), _pause_by_rate, 1.2),
    Target("pause at 100 Mbit/s / at 1 Gbit/s, at least", ("1 Gbit/s", "100 Mbit/s"), _pause_by_rate, 0.8, True),
    Target(
        "pause, SmolLM2-135M bf16", ("SmolLM2",), lambda results: results["SmolLM2"]["pause_s"], 0.5, form="{:.2f} s"
    ),
    Target("a receiving node beside 2 × model", ("1 GiB",), _more_than_two_copies, 128, form="{:.0f} MiB"),
    Target(
        "memory of ranks and engine over 50 publishes, growth",
        ("50 publishes",),
        lambda results: 100 * results["50 publishes"]["rss_growth"],
        2.0,
        form="{:.1f} %",
    ),
    Target("trainer blocked / snapshot copy, 1 GiB", ("1 GiB",), _ratio("1 GiB", "blocked_s", "snapshot_s"), 1.3),
)


def run_all(
    names: Sequence[str], *, repeats: int, cluster: str, model: Path | None, progress: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """The results of some of RUNS; SmolLM2 needs ``model``, its directory, and is left out without one."""
    results = {}
    for name in names:
        options = RUNS[name]
        if not options["nbytes"] and model is None:
            progress(f"{name}: left out, --model names no directory")
            continue
        progress(f"== {name}")
        fixed: dict[str, Any] = {"dtype": "bfloat16", "senders": 1, "receivers": 1, "link": "none", "algorithm": "auto"}
        fixed |= {"repeats": repeats, "cluster": cluster, "model": None if options["nbytes"] else model}
        results[name] = WeightsBench(**(fixed | options)).run(progress)
    return results


def markdown(results: Results) -> list[str]:
    """The table's lines, for the targets whose runs are there."""
    lines = [target.line(results) for target in TARGETS if all(run in results for run in target.runs)]
    return ["| what | asked | measured | reached |", "|---|---|---|---|", *lines]
