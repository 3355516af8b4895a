"""Sandboxes started ahead: how many of which kind are kept, and the shelf they wait on. No I/O; time is passed in.

A kind is what a container cannot change once it runs: image, work directory, mounts, whether it is guarded. How many of it are kept:
as many as were asked for within the time that one start takes, in the busiest such time of the last ten minutes. Then the busiest
moment would have found one ready for everybody, and what it took would have been replaced by the time of the next. Steady work needs
few; a trainer that leases a batch at once needs as many as the batch, up to the bound. A kind that nobody has asked for in ten
minutes is given up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hpcrl.sandbox.base import Mount, SandboxSpec
from hpcrl.sandbox.shell import ShellSandbox

__all__ = ["Demand", "Kind", "Shelf", "kind_of", "shares"]

_WINDOW_S = 600.0
_FIRST_GUESS_S = 0.1
"""A start, before one was measured."""
_WEIGHT = 0.2
"""Of the latest start in their mean."""


class Kind(NamedTuple):
    """What sandboxes must share for one to stand in for another. ``mounts``: target and whether it is writable."""

    image: Path | None
    workdir: str
    mounts: tuple[tuple[str, bool], ...]
    guarded: bool = False

    def spec(self, like: SandboxSpec) -> SandboxSpec:
        """What to start ahead: nothing of an attempt in it, and the limits of ``like`` for the start itself."""
        mounts = tuple(Mount(target=target, writable=writable) for target, writable in self.mounts)
        return SandboxSpec(
            image=self.image, workdir=self.workdir, mounts=mounts, limits=like.limits, guarded=self.guarded
        )


def kind_of(spec: SandboxSpec) -> Kind:
    mounts = tuple((mount.target, mount.writable) for mount in spec.mounts)
    return Kind(spec.image, spec.workdir, mounts, spec.guarded)


class Demand:
    """Arrivals of one kind. Example: 16 at once every minute → ``wanted`` is 16; one a second, started in 0.1 s → 1."""

    def __init__(self) -> None:
        self._start_s = _FIRST_GUESS_S
        self._recent: deque[float] = deque()
        # (time, arrivals within one start before it), counts falling: the first is the busiest of the window.
        self._peaks: deque[tuple[float, int]] = deque()
        self.last = float("-inf")

    def started(self, seconds: float) -> None:
        """A start of this kind took so long, waiting for its turn included."""
        self._start_s += _WEIGHT * (seconds - self._start_s)

    def arrived(self, now: float) -> None:
        self.last = now
        self._recent.append(now)
        while self._recent[0] < now - self._start_s:
            self._recent.popleft()
        while self._peaks and self._peaks[-1][1] <= len(self._recent):
            self._peaks.pop()
        self._peaks.append((now, len(self._recent)))

    def wanted(self, now: float) -> int:
        """How many should stand ready."""
        while self._peaks and self._peaks[0][0] < now - _WINDOW_S:
            self._peaks.popleft()
        return self._peaks[0][1] if self._peaks else 0


@dataclass(slots=True)
class Shelf:
    """Sandboxes of one kind that were started ahead, the oldest first; one that is still starting is a task that is not done."""

    spec: SandboxSpec
    demand: Demand = field(default_factory=Demand)
    members: deque[asyncio.Task[ShellSandbox]] = field(default_factory=deque)
    retry_at: float = 0.0
    """A start ahead has failed: not again before this."""

    def drop_dead(self) -> list[ShellSandbox]:
        """Take off what failed to start or has died since; those that died are to be stopped."""
        dead = []
        for task in list(self.members):
            if not task.done():
                continue
            failed = task.cancelled() or task.exception() is not None
            if failed or not task.result().alive:
                self.members.remove(task)
                if not failed:
                    dead.append(task.result())
        return dead


def shares(wanted: Sequence[int], bound: int) -> list[int]:
    """How many each kind gets when all together may have ``bound``: in the order given, the most recent first.

    Example: ``shares([3, 4, 2], 5)`` is ``[3, 2, 0]``.
    """
    given = []
    for number in wanted:
        given.append(min(number, bound))
        bound -= given[-1]
    return given
