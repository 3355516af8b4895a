"""When a run that only fails is given up: groups that failed one after the other, none completed between them. Pure.

Infrastructure and data failures never become rewards, so that without a limit a run whose every sandbox fails would try for ever.
The limit has two parts: so many groups, and so long. A disturbance that is over in a minute may cost many groups, and ends nothing.
"""

from __future__ import annotations

import json
from collections import Counter

__all__ = ["FailedRow"]

_CAUSES_SHOWN = 3
_MESSAGE_SHOWN = 200


class FailedRow:
    """The row of failed groups so far: ``groups`` of them since ``since``, the ``causes`` (``infra:sandbox_start`` → attempts), and
    what was said of the last attempt."""

    def __init__(self, limit: int, after_s: float) -> None:
        self._limit = limit
        self._after_s = after_s
        self.groups = 0
        self.since = 0.0
        self.causes: Counter[str] = Counter()
        self.last = ""

    def add_attempt(self, cause: str, text: str) -> None:
        self.causes[cause] += 1
        self.last = text

    def add_group(self, now: float) -> None:
        if self.groups == 0:
            self.since = now
        self.groups += 1

    def clear(self) -> bool:
        """A group was completed. Returns whether a row ended with it."""
        had = self.groups > 0
        self.groups, self.since, self.last = 0, 0.0, ""
        self.causes.clear()
        return had

    def verdict(self, now: float) -> str | None:
        """Why the run is to end, or None while it may go on."""
        if self.groups < self._limit or now - self.since < self._after_s:
            return None
        shown = ", ".join(f"{count} × {cause}" for cause, count in self.causes.most_common(_CAUSES_SHOWN))
        return (
            f"{self.groups} groups in a row failed within {now - self.since:.0f} s, none was completed: {shown}; the last, "
            f"{' '.join(self.last.split())[:_MESSAGE_SHOWN]} (coordinator.failed_groups, failed_after_s)"
        )

    def dump(self) -> str:
        """As the text that :meth:`load` reads."""
        values = {"groups": self.groups, "since": self.since, "causes": dict(self.causes), "last": self.last}
        return json.dumps(values)

    def load(self, text: str) -> None:
        values = json.loads(text)
        self.groups, self.since, self.last = values["groups"], values["since"], values["last"]
        self.causes = Counter(values["causes"])
