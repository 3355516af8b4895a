"""What ``weights.pin`` and ``weights.slots`` mean for an attempt when its replica changes versions. Pure.

    pin          slots   a replica may change versions when                        attempts bound to the old version
    trajectory   1       none of its attempts talks to it any more (drained)       have ended
    trajectory   2       none is bound to the older version that its second        go on with the engine they began with
                         engine still serves
    turn, token  1       no evaluation is bound to it                              go on; later tokens are of the new version

Evaluations measure exactly one version: they are pinned for the whole trajectory in every mode.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.config.schema import WeightsSection
from hpcrl.coordinator.entities import Attempt, Replica
from hpcrl.protocol.keys import Pin
from hpcrl.protocol.version import PolicyVersion

__all__ = ["Pinning"]


@dataclass(frozen=True, slots=True)
class Pinning:
    """The rules of one run. Example: ``Pinning("turn", standby=False)``; ``standby``: replicas have a second engine."""

    pin: Pin
    standby: bool

    @classmethod
    def of(cls, weights: WeightsSection) -> Pinning:
        return cls(weights.pin, weights.slots > 1)

    def of_attempt(self, attempt: Attempt) -> Pin:
        """How long this attempt stays with one version."""
        return "trajectory" if attempt.rollout.group.split == "eval" else self.pin

    def blockers(self, replica: Replica) -> list[Attempt]:
        """The attempts that must end before the replica may change versions."""
        if self.standby:
            return [attempt for attempt in replica.live.values() if attempt.version != replica.version]
        return [attempt for attempt in replica.live.values() if self.of_attempt(attempt) == "trajectory"]

    def blocked(self, replica: Replica) -> bool:
        """Whether there are any. Looks no further than the first: a replica may have thousands of attempts."""
        if self.standby:
            return any(attempt.version != replica.version for attempt in replica.live.values())
        return any(self.of_attempt(attempt) == "trajectory" for attempt in replica.live.values())

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
