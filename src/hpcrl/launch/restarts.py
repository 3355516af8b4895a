"""Which child that ended is started again, and what is told when it is not any more. Pure: a budget per step.

A step that keeps failing ends the run with the reason of its first failure: the later ones are often only its echo. A budget is full
again after progress: a step that lived for ten minutes; for the MPI world only a new checkpoint counts, as a world that
always dies before its next one would go on for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Restarts"]

_STEADY_S = 600.0


@dataclass(slots=True)
class _History:
    first: str = ""
    restarts: int = 0
    checkpoint: str | None = None


class Restarts:
    """``budget``: restarts of each step without progress."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._steps: dict[str, _History] = {}

    def again(
        self, step: str, reason: str, *, lived_s: float, checkpoint: str | None = None, world: bool = False
    ) -> bool:
        """``step`` ended for ``reason``: start it again? ``checkpoint``: the newest complete one; ``world``: only that is progress."""
        history = self._steps.setdefault(step, _History(checkpoint=checkpoint))
        if checkpoint != history.checkpoint if world else lived_s >= _STEADY_S:
            history = self._steps[step] = _History(checkpoint=checkpoint)
        if history.restarts >= self._budget:
            return False
        history.first = history.first or reason
        history.restarts += 1
        return True

    def told(self, step: str, last: str) -> str:
        """The reason to end the run with: the first, and how often it was tried since."""
        history = self._steps.get(step)
        if history is None or not history.restarts:
            return last
        again = "" if last == history.first else f"; at last: {last}"
        return f"{history.first} (restarted {history.restarts} times without progress{again})"
