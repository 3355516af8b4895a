"""The staleness contract as arithmetic: policy lag, age, and who may still be admitted.

Lag is counted in steps, whatever the lineage: after a resume from step c, a trajectory of the lost lineage at step c + 2 has
lag −2 at step c and is as usable as it was. Admission asks ahead: a group created now is consumed, at the latest, at step
``position + groups ahead of it / groups per step``; the version it is bound to must not be older than the bound by then.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.coordinator.entities import Attempt, Group
from hpcrl.protocol.states import State
from hpcrl.protocol.version import PolicyVersion

__all__ = ["Staleness", "policy_lag"]


def policy_lag(step: int, oldest: PolicyVersion) -> int:
    """Steps between the weights being trained (``step``) and the oldest version that sampled a token."""
    return step - oldest.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """The bounds of one run. Example: ``Staleness(max_policy_lag=2, max_age_s=None, groups_per_step=16, steps=100)``."""

    max_policy_lag: int
    max_age_s: float | None
    groups_per_step: int
    steps: int

    def oldest_usable_step(self, position: int) -> int:
        """The oldest version step that a batch trained at ``position`` may contain."""
        return position - self.max_policy_lag

    def needed_step(self, position: int, unconsumed: int) -> int | None:
        """The oldest version step that a new group may be bound to, with ``unconsumed`` groups created before it.

        None: the remaining steps need no further group.
        """
        if unconsumed >= (self.steps - position) * self.groups_per_step:
            return None
        return self.step_at(position, unconsumed)

    def step_at(self, position: int, place: int) -> int:
        """The oldest version step usable by the group at ``place`` (from 0) in the line of unconsumed groups."""
        return position + place // self.groups_per_step - self.max_policy_lag

    def spoiled(self, group: Group, position: int, now: float) -> tuple[str, list[Attempt]] | None:
        """The group's attempts that no batch trained at ``position`` or later may contain, and why (``stale``, ``too_old``).

        None when there are none. Age is known of accepted attempts only (it begins with the first token).
        """
        attempts = [rollout.attempt for rollout in group.rollouts if rollout.attempt is not None]
        stale = [a for a in attempts if policy_lag(position, a.oldest) > self.max_policy_lag]
        if stale:
            return "stale", stale
        limit = self.max_age_s
        if limit is None:
            return None
        old = [a for a in attempts if a.state is State.ACCEPTED and now - a.first_token_at > limit]
        return ("too_old", old) if old else None
