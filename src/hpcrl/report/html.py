"""RunData → one self-contained HTML page: no script, no external resource, readable in light and dark, printable. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from hpcrl.report.collect import RunData, Stage, stages
from hpcrl.report.style import STYLE
from hpcrl.report.svg import HALF, Line, bar_chart, line_chart
from hpcrl.report.tables import duration, rows_of, share

__all__ = ["render_html"]


def render_html(data: RunData, summary: Mapping[str, Any]) -> str:
    """The page. ``summary`` is what ``summarize`` gives."""
    title = escape(str(summary["run_id"]))
    body = [
        f"<h1>{title}</h1>",
        f'<p class="sub">{escape(_headline(summary))}</p>',
        f'<p class="bad">{escape(summary["reason"])}</p>' if summary["reason"] else "",
        _section("Learning curve", _learning(data)),
        _pair(
            _section("Policy lag of trained trajectories", _lags(summary)),
            _section("Attempts by final state", bar_chart(_present(summary["attempts"]), color=3, width=HALF)),
        ),
        _section("Time per stage", _time_chart(data)),
        _section("Time per stage, in numbers", _stage_table(stages(data))),
        _pair(
            _section("Time of a training step", _step_chart(data)),
            _section("Agreement of trainer and inference", _gap(data)),
        ),
        _pair(_section("Summary", _table(rows_of(summary))), _section("What went wrong", _wrong(summary))),
    ]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n" + "\n".join(part for part in body if part) + "\n</body>\n</html>\n"
    )


def _headline(summary: Mapping[str, Any]) -> str:
    parts = [summary["state"]] if summary["state"] else []
    if summary["steps"] is not None:
        parts.append(f"{summary['steps']} training steps")
    if summary["wall_s"] is not None:
        parts.append(duration(summary["wall_s"]))
    if summary["success_before"] is not None and summary["success_after"] is not None:
        parts.append(f"held-out success {share(summary['success_before'])} → {share(summary['success_after'])}")
    return " · ".join(parts)


def _learning(data: RunData) -> str:
    rewards = data.by_step("reward_mean")
    success = [(step, result.success) for step, result in data.evaluations() if result.success is not None]
    lines = [Line("reward of the trained batch", rewards, 1), Line("held-out success", success, 2, marks=True)]
    values = [value for line in lines for _, value in line.points]
    fits = all(0.0 <= value <= 1.0 for value in values)
    return line_chart(lines, "training step", "mean reward", (0.0, 1.0) if fits else None)


def _lags(summary: Mapping[str, Any]) -> str:
    lags = summary["lag_histogram"]
    return bar_chart(
        {f"{lag} step{'' if lag == '1' else 's'}": count for lag, count in lags.items()}, color=1, width=HALF
    )


def _time_chart(data: RunData) -> str:
    measured = stages(data)
    if not measured:
        return ""
    chart = bar_chart({stage.label: stage.p50 for stage in measured}, "s", color=1)
    return f'{chart}<p class="note">Median of one event, seconds. The whole step contains the other trainer stages.</p>'


def _stage_table(measured: Sequence[Stage]) -> str:
    if not measured:
        return ""
    head = "<tr><th>stage</th>" + "".join(
        f'<th class="n">{name}</th>' for name in ("events", "p50", "p90", "p99", "sum")
    )
    rows = [
        f'<tr><td>{escape(stage.label)}</td><td class="n">{stage.count:,}</td>'
        + "".join(f'<td class="n">{_seconds(value)}</td>' for value in (stage.p50, stage.p90, stage.p99, stage.total))
        + "</tr>"
        for stage in measured
    ]
    return f"<table>{head}</tr>{''.join(rows)}</table>"


def _step_chart(data: RunData) -> str:
    names = (("whole step", "step_s"), ("waiting for the batch", "batch_wait_s"), ("training", "train_s"))
    lines = [Line(label, data.by_step(name), color) for color, (label, name) in enumerate(names, start=1)]
    return line_chart(lines, "training step", "seconds", width=HALF)


def _gap(data: RunData) -> str:
    """log10, because good agreement is 1e-6 and a broken one 1e-1."""
    gaps = data.by_step("logprob_gap_max_lag0")
    points = [(float(step), math.log10(max(value, 1e-9))) for step, value in gaps]
    if not points:
        return ""
    low = min(-6.0, *(y for _, y in points))
    chart = line_chart([Line("largest gap", points, 4)], "training step", "log10 of the largest gap", (low, 0.0), HALF)
    return f'{chart}<p class="note">|trainer − recorded| logprob of sampled tokens, trajectories of the current version.</p>'


def _wrong(summary: Mapping[str, Any]) -> str:
    rows: list[tuple[str, str]] = []
    for title, key in (
        ("failure", "failures"),
        ("policy failure", "policy_failures"),
        ("cancelled", "cancelled"),
        ("late report", "rejected_reports"),
    ):
        rows += [(f"{title}: {reason}", f"{count:,}") for reason, count in sorted(_present(summary[key]).items())]
    return _table(rows) if rows else "<p>Nothing.</p>"


def _present(counts: Mapping[str, float]) -> dict[str, float]:
    return {name: count for name, count in counts.items() if count}


def _table(rows: Iterable[tuple[str, str]]) -> str:
    body = "".join(f'<tr><td>{escape(name)}</td><td class="n">{escape(value)}</td></tr>' for name, value in rows)
    return f"<table>{body}</table>"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{content}\n</section>" if content else ""


def _pair(*sections: str) -> str:
    shown = [section for section in sections if section]
    return '<div class="pair">' + "\n".join(shown) + "</div>" if shown else ""


def _seconds(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f} s"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.3g} ms"
