"""The one rule by which a long tool result is cut: the first half and the last half of the budget stay, a marker stands between.

Used where output is collected (sandbox), where a built-in tool answers (harness) and, for harnesses that are not ours, in the
proxy before a message of role ``tool`` is tokenised. The budget is ``sandbox.output_bytes`` of the configuration.
"""

from __future__ import annotations

__all__ = ["MARGIN", "clip", "marker", "within"]

MARGIN = 256
"""Bytes by which a result may exceed the budget uncut: the marker of an earlier cut, and a note on time or exit code."""


def marker(omitted: int) -> str:
    """The line that stands for ``omitted`` bytes."""
    return f"\n[... {omitted} bytes omitted ...]\n"


def clip(text: str, budget: int) -> str:
    """``text`` within ``budget`` bytes of UTF-8 plus the marker. Characters cut in half become U+FFFD."""
    data = text.encode("utf-8", "replace")
    if len(data) <= budget:
        return text
    head, tail = (budget + 1) // 2, budget // 2
    end = data[len(data) - tail :].decode("utf-8", "replace")
    return data[:head].decode("utf-8", "replace") + marker(len(data) - head - tail) + end


def within(text: str, budget: int) -> str:
    """As :func:`clip`, but what was cut before (and carries notes) is left as it is: applying it again changes nothing."""
    if len(text) <= budget // 4 or len(text.encode("utf-8", "replace")) <= budget + MARGIN:
        return text
    return clip(text, budget)
