"""Signals to the launcher, collected instead of obeyed at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

__all__ = ["Signals", "collect_signals"]


@dataclass(slots=True)
class Signals:
    """``stop``: those that ask for the end, in order; ``near_end``: SIGUSR1: the time limit is near (``#SBATCH --signal``)."""

    stop: list[int] = field(default_factory=list)
    near_end: bool = False

    def stopped_by(self) -> str:
        """ "" while nobody asked."""
        return f"stopped by {signal.Signals(self.stop[0]).name}" if self.stop else ""

    def _receive(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.near_end = True
        else:
            self.stop.append(number)


@contextmanager
def collect_signals() -> Iterator[Signals]:
    """SIGTERM, SIGINT, SIGHUP and SIGUSR1 until the end of the block."""
    signals = Signals()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    previous = {number: signal.signal(number, signals._receive) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
