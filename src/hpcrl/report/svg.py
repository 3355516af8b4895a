"""Small SVG charts as text. Pure functions: numbers in, one ``<svg>`` element out; colours come from the page's CSS variables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from hpcrl.errors import UserError

__all__ = ["HALF", "WHOLE", "Line", "bar_chart", "line_chart", "standalone_chart", "ticks"]

WHOLE, HALF = 1000, 470
"""Widths of a chart that has the page's width, and of one of two side by side: drawn about 1:1, so that letters keep their size."""
_HEIGHT = 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 14, 40
_BAR_H, _VALUE_W = 22, 90
_LETTER = 7.4
"""Width of an average letter of the labels."""


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: ``points`` are (x, y) in x order; ``marks`` draws a dot at each (for few points). ``color``: 1…4."""

    label: str
    points: Sequence[tuple[float, float]]
    color: int = 1
    marks: bool = False


def ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Round numbers that cover ``low … high``. Example: ``ticks(0, 0.93)`` is ``[0, 0.2, 0.4, 0.6, 0.8, 1.0]``."""
    if not high > low:
        high = low + 1.0
    rough = (high - low) / max(1, wanted - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def line_chart(
    lines: Sequence[Line], x_label: str, y_label: str, y_range: tuple[float, float] | None = None, width: int = WHOLE
) -> str:
    """Curves over a common x axis, with a legend when there are several. Empty text when there is nothing to draw."""
    drawn = [line for line in lines if line.points]
    if not drawn:
        return ""
    parts = _plot(drawn, x_label, y_label, y_range, width)
    return _svg(width, _HEIGHT, parts, f"{y_label} over {x_label}") + (_legend(drawn) if len(drawn) > 1 else "")


def standalone_chart(
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    y_range: tuple[float, float] | None,
    style: str,
    width: int = WHOLE,
) -> str:
    """The same as an SVG file of its own: legend and ``style`` sheet inside. Raises UserError when there is nothing to draw."""
    drawn = [line for line in lines if line.points]
    if not drawn:
        raise UserError("nothing to draw: none of the runs has a reading")
    legend = [
        f'<text x="{_LEFT + (width // 2) * (index % 2)}" y="{16 + 16 * (index // 2)}" class="c{line.color} key">'
        f"{'●' if line.marks else '—'} {escape(line.label)}</text>"
        for index, line in enumerate(drawn)
    ]
    top = 16 * ((len(drawn) + 1) // 2) + 8
    plot = "\n".join(_plot(drawn, x_label, y_label, y_range, width))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT + top}" width="{width}" height="{_HEIGHT + top}">\n'
        f'<style>{style} svg .key {{ fill: var(--c) }}</style>\n<rect width="100%" height="100%" style="fill: var(--page)"/>\n'
        + "\n".join(legend)
        + f'\n<g transform="translate(0 {top})">\n{plot}\n</g>\n</svg>\n'
    )


def _plot(
    drawn: Sequence[Line], x_label: str, y_label: str, y_range: tuple[float, float] | None, width: int
) -> list[str]:
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points]
    x_ticks = ticks(min(xs), max(xs), 8)
    if all(float(x).is_integer() for x in xs):
        x_ticks = [tick for tick in x_ticks if float(tick).is_integer()]
    y_ticks = ticks(*(y_range or (min(0.0, min(ys)), max(ys))))
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1e-9)
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) if len(set(xs)) > 1 else 0.5
        up = (min(max(y, y_low), y_high) - y_low) / (y_high - y_low)
        return _LEFT + across * (width - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for tick in y_ticks:
        _, y = at(x_low, tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
    for tick in x_ticks:
        if x_low <= tick <= x_high:
            x, _ = at(tick, y_low)
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{_short(tick)}</text>'
            )
    for line in drawn:
        places = [at(x, y) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        if len(places) > 1:
            parts.append(f'<polyline class="curve c{line.color}" points="{path}"/>')
        if line.marks or len(places) == 1:
            parts += [f'<circle class="mark c{line.color}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in places]
    parts.append(
        f'<text class="axis" x="{(_LEFT + width) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>'
    )
    middle = (_HEIGHT - _BOTTOM + _TOP) / 2
    parts.append(
        f'<text class="axis" x="13" y="{middle}" text-anchor="middle" transform="rotate(-90 13 {middle})">{escape(y_label)}</text>'
    )
    return parts


def bar_chart(values: Mapping[str, float], unit: str = "", color: int = 1, width: int = WHOLE) -> str:
    """Horizontal bars from 0, one per entry in the given order. Values are not negative. Empty text without entries."""
    if not values:
        return ""
    height = len(values) * _BAR_H + 8
    longest = max(values.values()) or 1.0
    start = 12 + _LETTER * max(len(label) for label in values)
    room = width - start - _VALUE_W
    parts = []
    for index, (label, value) in enumerate(values.items()):
        y = 4 + index * _BAR_H
        length = max(1.0, room * value / longest) if value else 0.0
        parts.append(f'<text class="label" x="{start - 8:.1f}" y="{y + 15}" text-anchor="end">{escape(label)}</text>')
        parts.append(
            f'<rect class="bar c{color}" x="{start:.1f}" y="{y + 3}" width="{length:.1f}" height="{_BAR_H - 7}"/>'
        )
        text = f"{_short(value)} {unit}".strip()
        parts.append(f'<text class="tick" x="{start + length + 6:.1f}" y="{y + 15}">{escape(text)}</text>')
    return _svg(width, height, parts, "bar chart")


def _svg(width: int, height: int, parts: Sequence[str], title: str) -> str:
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">\n{body}\n</svg>\n'


def _legend(lines: Sequence[Line]) -> str:
    entries = " ".join(f'<span><i class="c{line.color}"></i>{escape(line.label)}</span>' for line in lines)
    return f'<p class="legend">{entries}</p>\n'


def _short(value: float) -> str:
    """Three significant digits below 1, else four; thousands separated."""
    if value and abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 1 else f"{value:.3g}"
