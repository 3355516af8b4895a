"""The summary as rows of text, and the table a run prints at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

__all__ = ["duration", "rows_of", "share", "summary_table"]


def share(value: float) -> str:
    """0.875 → ``0.88``."""
    return f"{value:.2f}"


def duration(seconds: float) -> str:
    """Seconds for people. 8.2 → ``8.2 s``, 754 → ``12 min 34 s``, 7265 → ``2 h 1 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def rows_of(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, value) of everything in the summary that the run got to."""
    rows: list[tuple[str, Any]] = [
        ("state", summary["state"]),
        ("reason", summary["reason"]),
        ("seed", summary["seed"]),
        ("training steps", summary["steps"]),
        ("held-out success before", _or_none(share, summary["success_before"])),
        ("held-out success after", _or_none(share, summary["success_after"])),
        ("wall clock", _or_none(duration, summary["wall_s"])),
        ("attempts", _counts(summary["attempts"])),
        ("trajectories trained", summary["trajectories_trained"]),
        ("trained twice", summary["duplicates"]),
        ("largest policy lag", summary["max_lag"]),
        ("versions published", summary["versions_published"]),
        ("publishing, median", _or_none(duration, summary["publish_s_p50"])),
        ("flip pause, median", _or_none(_milliseconds, summary["flip_pause_s_p50"])),
        ("digests equal on all replicas", _or_none(_yes_no, summary["digests_equal"])),
        ("tokens generated", summary["tokens_generated"]),
        ("tokens trained", summary["tokens_trained"]),
        ("largest logprob gap at lag 0", _or_none("{:.1e}".format, summary["logprob_gap_max_lag0"])),
        ("updates skipped (not finite)", summary["skipped_updates"] or None),
        ("sandboxes that stood ready", _ready(summary["pool_hits"], summary["pool_misses"])),
        ("failures", _counts(summary["failures"]) or "none"),
        ("late reports", _counts(summary["rejected_reports"]) or None),
    ]
    return [
        (name, f"{value:,}" if isinstance(value, int) else str(value))
        for name, value in rows
        if value not in (None, "")
    ]


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The end-of-run table (rich)."""
    table = Table(title=f"Run {summary['run_id']}", title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in rows_of(summary):
        table.add_row(name, value)
    return table


def _or_none(show: Any, value: Any) -> str | None:
    return None if value is None else show(value)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def _yes_no(value: bool) -> str:
    return "yes" if value else "NO"


def _ready(hits: int, misses: int) -> str | None:
    """None where no sandboxes are started ahead."""
    return f"{hits:,} of {hits + misses:,}" if hits + misses else None


def _counts(counts: Mapping[str, int]) -> str:
    """``consumed 2,048 · infra_failed 3``; zero counts are left out."""
    return " · ".join(f"{name} {count:,}" for name, count in counts.items() if count)
