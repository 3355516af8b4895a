"""Counters of everything that ever happened, kept as it happens: a status call scans nothing."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from hpcrl.protocol.states import State

__all__ = ["Tally"]

_RECENT = 256


@dataclass(slots=True)
class Tally:
    """``failures`` counts ``kind:reason``; ``lag`` maps policy lag to trajectories consumed."""

    attempts: Counter[State] = field(default_factory=Counter)
    rollouts: Counter[State] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    cancelled: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    lag: Counter[int] = field(default_factory=Counter)
    consumed: int = 0
    accepted_unused: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    @property
    def in_flight(self) -> int:
        """Attempts between lease and acceptance."""
        count = self.attempts
        return count[State.LEASED] + count[State.RUNNING] + count[State.ARTIFACT_READY] + count[State.SCORED]

    @property
    def recent_reward(self) -> float | None:
        """Mean reward of the last accepted training trajectories (at most 256)."""
        return sum(self.recent) / len(self.recent) if self.recent else None
