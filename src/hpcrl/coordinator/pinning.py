"""What ``weights.pin`` and ``weights.slots`` mean for an attempt when its replica changes versions. Pure.

    pin          slots   a replica may change versions when                        attempts bound to the old version
    trajectory   1       none of its attempts talks to it any more (drained)       have ended
    trajectory   n > 1   its pinned attempts need n - 1 versions, what it serves   go on with the engine (two) or the adapter (lora)
                         now included: then there is a place for the new one       they began with
    turn, token  any     the same, counting evaluations only                       go on; later tokens are of the new version

Evaluations measure exactly one version: they are pinned for the whole trajectory in every mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpcrl.config.schema import RunConfig
from hpcrl.coordinator.entities import Attempt, Replica
from hpcrl.protocol.keys import Pin
from hpcrl.protocol.version import PolicyVersion

__all__ = ["Pinning"]


@dataclass(frozen=True, slots=True)
class Pinning:
    """The rules of one run. Example: ``Pinning("trajectory", slots=2)``; ``slots``: versions that a replica serves side by side."""

    pin: Pin
    slots: int

    @classmethod
    def of(cls, config: RunConfig) -> Pinning:
        return cls(config.weights.pin, config.slots)

    @property
    def standby(self) -> bool:
        """Whether a replica goes on with the old version while it takes the new one."""
        return self.slots > 1

    def of_attempt(self, attempt: Attempt) -> Pin:
        """How long this attempt stays with one version."""
        return "trajectory" if attempt.rollout.group.split == "eval" else self.pin

    def blockers(self, replica: Replica) -> list[Attempt]:
        """The attempts that must end before the replica may change versions."""
        room_for = self.needed(replica)[: self.slots - 1]
        return [attempt for attempt in self._pinned(replica) if attempt.version not in room_for]

    def needed(self, replica: Replica) -> list[PolicyVersion]:
        """The versions that the replica has to go on serving: the present one, then those that attempts are pinned to, newest first."""
        present = [] if replica.version is None else [replica.version]
        pinned = {attempt.version for attempt in self._pinned(replica)}
        return [*present, *sorted(pinned.difference(present), reverse=True)]

    def _pinned(self, replica: Replica) -> Iterator[Attempt]:
        return (attempt for attempt in replica.live.values() if self.of_attempt(attempt) == "trajectory")

    def blocked(self, replica: Replica) -> bool:
        """Whether there are any. Looks no further than it must: a replica may have thousands of attempts."""
        needed = set() if replica.version is None else {replica.version}
        for attempt in self._pinned(replica):
            needed.add(attempt.version)
            if len(needed) >= self.slots:
                return True
        return False

    def outlives(self, attempt: Attempt, now_served: PolicyVersion) -> bool:
        """Whether the attempt goes on when its replica has changed to ``now_served``."""
        if attempt.version == now_served or self.standby:
            return True
        return self.of_attempt(attempt) != "trajectory" and _follows(now_served, attempt.version)

    def covers(self, attempt: Attempt, oldest: PolicyVersion, newest: PolicyVersion) -> bool:
        """Whether trained tokens of versions ``oldest`` … ``newest`` are what the attempt was allowed to sample."""
        if self.of_attempt(attempt) == "trajectory":
            return attempt.version == oldest == newest
        return _follows(oldest, attempt.version) and _follows(newest, oldest)


def _follows(later: PolicyVersion, earlier: PolicyVersion) -> bool:
    return later.lineage == earlier.lineage and later.step >= earlier.step
