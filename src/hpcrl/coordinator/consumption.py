"""Handing groups to a batch, and taking them back: the two moves between ACCEPTED and CONSUMED. Pure; moves objects of a ledger."""

from __future__ import annotations

from hpcrl.coordinator import stragglers
from hpcrl.coordinator.entities import Group
from hpcrl.coordinator.ledger import Ledger
from hpcrl.protocol.states import State

__all__ = ["consume", "take_back"]


def consume(ledger: Ledger, group: Group, now: float) -> None:
    """Hand the group's accepted attempts to the batch trained at the present position (which turns it into step + 1)."""
    step = ledger.position.step + 1
    tail = stragglers.tail_of(ledger.groups, group)
    if tail is not None:
        tail.baseline = [attempt.reward for attempt in group.accepted if attempt.reward is not None]
        ledger.changes.group(tail)
    _count(ledger, group, 1)
    for attempt in group.accepted:
        lag = ledger.position.step - attempt.oldest.step
        attempt.consumed_step = step
        ledger.move(attempt, State.CONSUMED, now, f"step {step}")
        ledger.changes.rollout(attempt.rollout)
        ledger.changes.consumption(attempt, step, lag)
        ledger.tally.add("lag", lag)
    group.state, group.consumed_step = "consumed", step
    ledger.unconsumed -= group.head is None
    ledger.evict(group)
    ledger.changes.group(group)


def take_back(ledger: Ledger, group: Group, now: float) -> None:
    """Undo :func:`consume` (a resume, a batch that was given back); the group waits for a batch again."""
    for rollout in group.rollouts:
        attempt = rollout.attempt
        if attempt is None or attempt.state is not State.CONSUMED:
            continue
        lag = (attempt.consumed_step or 0) - 1 - attempt.oldest.step
        attempt.consumed_step = None
        ledger.move(attempt, State.ACCEPTED, now, "resume")
        ledger.changes.rollout(rollout)
        ledger.tally.add("lag", lag, -1)
        ledger.attempts[attempt.attempt_id] = attempt
        ledger.ended.pop(attempt.attempt_id, None)
    group.consumed_step = None
    _count(ledger, group, -1)
    ledger.groups[group.group_id] = group
    ledger.set_complete(group)
    ledger.unconsumed += group.head is None
    ledger.changes.group(group)


def _count(ledger: Ledger, group: Group, by: int) -> None:
    if group.head is not None:
        ledger.tally.add("groups", "tails_consumed", by)
        return
    ledger.tally.add("groups", "consumed", by)
    ledger.tally.add("groups", "zero_variance", by * group.zero_variance)
