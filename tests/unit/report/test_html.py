from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console

from hpcrl.report import collect, render_html, summarize, summary_table
from hpcrl.report.svg import Line, bar_chart, line_chart, ticks
from hpcrl.report.tables import duration


def page(run_dir: Path) -> str:
    data = collect(run_dir)
    return render_html(data, summarize(data))


def test_the_page_is_well_formed_and_self_contained(run_dir: Path) -> None:
    text = page(run_dir)
    for outside in ("http", "<script", "src=", "@import", "url("):
        assert outside not in text
    start = text.index("<body>")
    ElementTree.fromstring(text[start : text.index("</body>")] + "</body>")


def test_the_page_shows_the_run(run_dir: Path) -> None:
    text = page(run_dir)
    for part in (
        "success · 3 training steps · 12 min 34 s · held-out success 0.30 → 0.90",
        "Learning curve",
        "held-out success",
        "1 step<",
        "2 steps<",
        "infra_failed",
        "failure: infra:sandbox_start",
        "late report: lease_expired",
        "sandbox start",
    ):
        assert part in text
    assert "running" not in text.split("Attempts by final state")[1].split("</section>")[0]


def test_an_empty_run_gives_a_page(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    assert "What went wrong" in page(tmp_path)


def test_names_are_escaped(run_dir: Path) -> None:
    data = collect(run_dir)
    summary = {**summarize(data), "reason": "<b>&", "failures": {"infra:<x>": 1}}
    text = render_html(data, summary)
    assert "<b>" not in text and "&lt;b&gt;&amp;" in text and "infra:&lt;x&gt;" in text


def test_the_table(run_dir: Path) -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summary_table(summarize(collect(run_dir))))
    text = console.export_text()
    assert "held-out success after" in text and "0.90" in text and "consumed 96 · infra_failed 2" in text
    assert "20 ms" in text and "yes" in text


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 0.93, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (1, 16, [0, 5, 10, 15, 20]),
        (5, 5, [5.0, 5.5, 6.0]),
        (-6, 0, [-6, -4, -2, 0]),
    ],
)
def test_ticks(low: float, high: float, expected: list[float]) -> None:
    made = ticks(low, high)
    assert made[0] <= low and made[-1] >= high
    if low != high:
        assert made == expected


def test_charts_of_little_data() -> None:
    assert line_chart([Line("x", [])], "x", "y") == "" and bar_chart({}) == ""
    assert "<circle" in line_chart([Line("one", [(3, 0.5)])], "step", "reward")
    assert bar_chart({"none": 0.0}).count("<rect") == 1
    for text in (line_chart([Line("flat", [(1, 2), (2, 2)])], "x", "y"), bar_chart({"a": 1, "b<": 2}, "s")):
        ElementTree.fromstring(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(8.2, "8.2 s"), (59.94, "59.9 s"), (754, "12 min 34 s"), (3599.9, "1 h 0 min"), (7265, "2 h 1 min")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
