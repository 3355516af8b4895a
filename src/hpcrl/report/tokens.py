"""One trajectory, token by token, with colours: for the terminal (``shards show``) and as a page (``--html``). Pure.

    a cell    one token; a dim bar stands between tokens            green … red    logprob of a sampled token, 0 … ≤ −5
    grey      not trained: prompt, template, tool results           underlined     trained
    headings  segments (and why they were opened), versions where they change, calls (ending, tool calls, seconds)

Tokens are text by the model's own tokenizer; without one they are numbers.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpcrl.trajectory.schema import Trajectory

__all__ = ["LEGEND", "Cell", "Heading", "cells", "colour", "render_page"]

LEGEND = "grey: not sampled · green to red: sampled, logprob 0 to −5 or less · underlined: trained"
_WORST = -5.0
_STYLE = (
    "body{font:14px/1.6 ui-monospace,monospace;max-width:110ch;margin:2em auto;color:#222;background:#fff}"
    "pre{white-space:pre-wrap;word-break:break-word}h2{font-size:14px;margin:1.2em 0 .3em;border-top:1px solid #ccc}"
    "i{font-style:normal;color:#888}i,b{border-right:1px solid #ddd}b{font-weight:normal;color:#000}"
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One token. ``logprob`` and ``version`` are None where it was not sampled."""

    index: int
    token_id: int
    text: str
    trained: bool
    logprob: float | None
    version: str | None


@dataclass(frozen=True, slots=True)
class Heading:
    """What begins at the next cell."""

    text: str


def cells(trajectory: Trajectory, piece: Callable[[int], str]) -> Iterator[Cell | Heading]:
    """All tokens in order, with headings where something begins. ``piece`` gives a token's text."""
    versions: dict[int, str] = {}
    for start, end, lineage, step in trajectory.spans.tolist():
        versions.update(dict.fromkeys(range(start, end), f"{lineage}.{step}"))
    segments = {int(start): number for number, start in enumerate(trajectory.segments)}
    requests = {int(request["start"]): request for request in trajectory.requests if request["end"] > request["start"]}
    opened = {int(request["segment"]): request.get("opens") for request in trajectory.requests if request.get("opens")}
    for index, token_id in enumerate(trajectory.token_ids.tolist()):
        if index in segments:
            number = segments[index]
            yield Heading(f"segment {number}" + (f" ({opened[number]})" if number in opened else ""))
        if index in requests:
            yield Heading(_call(requests[index], versions.get(index)))
        elif index - 1 in versions and index in versions and versions[index] != versions[index - 1]:
            yield Heading(f"version {versions[index]}")
        version = versions.get(index)
        logprob = None if version is None else float(trajectory.logprobs[index])
        yield Cell(index, token_id, piece(token_id), bool(trajectory.loss_mask[index]), logprob, version)


def _call(request: Mapping[str, Any], version: str | None) -> str:
    called = ", ".join(str(call["name"]) for call in request.get("tool_calls") or ())
    text = (
        f"{request['request_id']}: {request['end'] - request['start']} tokens, {request['ending']}, version {version}"
    )
    return text + (f", calls {called}" if called else "") + _times(request)


def _times(request: Mapping[str, Any]) -> str:
    """Seconds of one call: waiting at the proxy and in the engine, then its two parts, or the whole where the engine did not tell."""
    if "generate_s" not in request:
        return ""
    engine = request.get("engine")
    if engine is None:
        return f"; queue {request['queue_s']:.3f} s, engine {request['generate_s']:.3f} s"
    queue_s = request["queue_s"] + engine["queue_s"]
    return f"; queue {queue_s:.3f} s, prefill {engine['prefill_s']:.3f} s, decode {engine['decode_s']:.3f} s"


def colour(logprob: float) -> str:
    """Green for a certain token, red for one of logprob −5 or less: ``#rrggbb``, readable on white and on black."""
    share = min(max(logprob / _WORST, 0.0), 1.0)
    return f"#{int(40 + 170 * share):02x}{int(150 - 100 * share):02x}46"


def render_page(title: str, about: str, found: Iterator[Cell | Heading]) -> str:
    """A page without scripts or further files; each token's id, logprob and version show when it is pointed at."""
    parts = [f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>"]
    parts.append(f"<h1>{html.escape(title)}</h1><p>{html.escape(about)}<br>{html.escape(LEGEND)}</p><pre>")
    for one in found:
        if isinstance(one, Heading):
            parts.append(f"</pre><h2>{html.escape(one.text)}</h2><pre>")
            continue
        title_text, style, tag = f"{one.index}: {one.token_id}", "", "i"
        if one.logprob is not None:
            tag, title_text = "b", f"{title_text}, logprob {one.logprob:.4f}, version {one.version}"
            line = "underline" if one.trained else "none"
            style = f' style="background:{colour(one.logprob)}33;text-decoration:{line}"'
        parts.append(f'<{tag}{style} title="{title_text}">{html.escape(one.text)}</{tag}>')
    return "".join([*parts, "</pre>\n"])
