"""What a run left behind, for people: ``summary.json``, ``report.html`` and the end-of-run table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcrl.protocol.rundir import publish_text
from hpcrl.report.collect import RunData, collect, save_summary, summarize
from hpcrl.report.html import render_html
from hpcrl.report.tables import summary_table

__all__ = ["RunData", "collect", "render_html", "save_summary", "summarize", "summary_table", "write_report"]


def write_report(root: Path | str) -> dict[str, Any]:
    """Write ``summary.json`` and ``report.html`` into the run directory; returns the summary. Raises UserError."""
    data = collect(root)
    summary = summarize(data)
    save_summary(data, summary)
    publish_text(data.run.report, render_html(data, summary))
    return summary
