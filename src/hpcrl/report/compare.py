"""Several runs side by side: one stand-alone SVG of their learning curves, and a Markdown table of their numbers.

Runs are given in named sets ("real", "control"). The thick curve of a set is the mean over its runs; dots are held-out success of
each run. Used for the curves in docs/.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from hpcrl.report.collect import RunData, collect, summarize
from hpcrl.report.style import STYLE
from hpcrl.report.svg import Line, standalone_chart

__all__ = ["compare_svg", "compare_table"]

_COLUMNS = (
    "seed",
    "success_before",
    "success_after",
    "seconds_to_0.8",
    "max_lag",
    "duplicates",
    "logprob_gap_max_lag0",
    "wall_s",
    "state",
)


def compare_svg(sets: Mapping[str, Sequence[Path]]) -> str:
    """Held-out success and mean batch reward against the training step. Raises UserError for a directory that is no run."""
    lines = []
    for color, (label, roots) in enumerate(sets.items(), start=1):
        runs = [collect(root) for root in roots]
        lines.append(Line(f"{label}: reward of the trained batch", _mean_curve(runs, "reward_mean"), color))
        lines.append(Line(f"{label}: held-out success", _mean_curve(runs, "eval_success"), color, marks=True))
    return standalone_chart(lines, "training step", "mean over runs", (0.0, 1.0), STYLE)


def compare_table(sets: Mapping[str, Sequence[Path]]) -> str:
    """A Markdown table, one row per run."""
    rows = ["| set | " + " | ".join(_COLUMNS) + " |", "|---|" + "---|" * len(_COLUMNS)]
    for label, roots in sets.items():
        for root in roots:
            data = collect(root)
            summary = {**summarize(data), "seconds_to_0.8": _seconds_to(data, 0.8)}
            rows.append(f"| {label} | " + " | ".join(_cell(summary.get(name)) for name in _COLUMNS) + " |")
    return "\n".join(rows) + "\n"


def _seconds_to(run: RunData, success: float) -> float | None:
    """Wall clock from the run's start to the end of its first evaluation at or above ``success``; None if there was none."""
    times = [point.t for point in run.series.get("eval_success", []) if point.value >= success]
    started = run.end.get("started_at")
    return round(min(times) - started, 1) if times and started is not None else None


def _mean_curve(runs: Sequence[RunData], name: str) -> list[tuple[float, float]]:
    by_step: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        for point in run.series.get(name, []):
            if point.step is not None:
                by_step[point.step].append(point.value)
    return [(float(step), mean(values)) for step, values in sorted(by_step.items())]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        if abs(value) >= 100:
            return f"{value:.0f}"
        return f"{value:.1e}" if value and abs(value) < 1e-3 else f"{value:.3g}"
    return "–" if value is None else str(value)
