"""Counters of everything that ever happened, kept as it happens: a status call scans nothing, and neither does a restart.

Every change goes through :meth:`Tally.add`, which hands the new value to ``saved`` (a row of the table ``counters``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from hpcrl.protocol.states import State

__all__ = ["Tally"]

_RECENT = 256
_KEYS: dict[str, Callable[[str], Any]] = {"attempts": State, "rollouts": State, "lag": int}


class Tally:
    """``failures`` counts ``kind:reason``; ``groups`` how groups of the training split fared (``consumed``, ``zero_variance`` of
    those, ``redrawn:REASON``, ``closed:REASON``, …); ``lag`` maps policy lag to trajectories consumed."""

    def __init__(self, saved: Callable[[str, str, int], None]) -> None:
        self._saved = saved
        self.attempts: Counter[State] = Counter()
        self.rollouts: Counter[State] = Counter()
        self.failures: Counter[str] = Counter()
        self.cancelled: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.groups: Counter[str] = Counter()
        self.lag: Counter[int] = Counter()
        self.accepted_unused = 0
        self.recent: deque[float] = deque(maxlen=_RECENT)

    def add(self, name: str, item: Any, by: int = 1) -> None:
        """Change one counter: ``name`` is one of the attributes above. Example: ``add("failures", "infra:node_lost")``."""
        counter = getattr(self, name)
        counter[item] += by
        self._saved(name, str(item), counter[item])

    def restore(self, name: str, item: str, value: int) -> None:
        """Set a counter to what a row of the table says."""
        getattr(self, name)[_KEYS.get(name, str)(item)] = value

    @property
    def consumed(self) -> int:
        return sum(self.lag.values())

    @property
    def in_flight(self) -> int:
        """Attempts between lease and acceptance."""
        count = self.attempts
        return count[State.LEASED] + count[State.RUNNING] + count[State.ARTIFACT_READY] + count[State.SCORED]

    @property
    def recent_reward(self) -> float | None:
        """Mean reward of the last accepted training trajectories (at most 256)."""
        return sum(self.recent) / len(self.recent) if self.recent else None
