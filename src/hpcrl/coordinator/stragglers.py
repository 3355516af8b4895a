"""The straggler rule: a group may be trained with K of its G rollouts, and the rest follows. Pure; moves live objects of a ledger.

    K accepted ─► ripe ─(straggler_grace_s)─► split:  head  the K and more, complete, takes the group's place in the line
                                                      tail  ``<group>t``: what has not ended goes on, takes no place
    tail complete ─► joins its head's batch, or a later one with its head's rewards as ``baseline``

Nothing is dropped for having been slow, so batches do not lean towards fast samples: every rollout of a group is trained exactly
once, only later. A latecomer is judged against the rewards of its whole group. What gets out of the staleness bound meanwhile is
drawn again like anything else, and the last batch of a run waits for all stragglers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcrl.coordinator.entities import Group
from hpcrl.protocol.states import State

if TYPE_CHECKING:
    from hpcrl.coordinator.ledger import Ledger

__all__ = ["note_ripe", "split", "split_due", "tail_of"]


def tail_of(groups: dict[str, Group], group: Group) -> Group | None:
    """The stragglers that were split off the group and are not consumed yet."""
    return groups.get(_tail_id(group))


def note_ripe(ledger: Ledger, group: Group, now: float) -> None:
    """The grace begins when ``min_group`` rollouts of an open group are accepted. A group is split once."""
    least = ledger.config.rollout.min_group
    if least is None or group.split != "train" or group.head is not None or group.state != "open":
        return
    if (
        group.unended
        and group.ripe_at is None
        and len(group.accepted) >= least
        and tail_of(ledger.groups, group) is None
    ):
        group.ripe_at = now
        ledger.ripe[group.group_id] = group


def split_due(ledger: Ledger, now: float) -> None:
    """Split the groups whose grace is over."""
    grace = ledger.config.rollout.straggler_grace_s
    if ledger.position.step >= ledger.staleness.steps - 1:
        return
    for group in list(ledger.ripe.values()):
        if group.ripe_at is not None and now - group.ripe_at >= grace and len(group.accepted) >= 2:
            split(ledger, group)


def split(ledger: Ledger, group: Group) -> None:
    """What has not ended becomes the group's tail; the rest is complete."""
    tail = Group(
        group_id=_tail_id(group),
        seq=group.seq,
        split=group.split,
        task=group.task,
        created_at=group.created_at,
        min_step=group.min_step,
        head=group.group_id,
    )
    tail.rollouts = [rollout for rollout in group.rollouts if not rollout.ended]
    group.rollouts = [rollout for rollout in group.rollouts if rollout.ended]
    tail.unended, group.unended = len(tail.rollouts), 0
    group.pending.clear()
    ledger.groups[tail.group_id] = tail
    for rollout in tail.rollouts:
        rollout.group = tail
        ledger.changes.rollout(rollout)
        if rollout.attempt is not None:
            ledger.changes.attempt(rollout.attempt)
        elif rollout.state is State.PENDING:
            ledger.enqueue(rollout)
    ledger.tally.add("groups", "split")
    ledger.tally.add("groups", "stragglers", tail.unended)
    ledger.set_complete(group)
    ledger.end_failing()
    ledger.changes.group(group)
    ledger.changes.group(tail)


def _tail_id(group: Group) -> str:
    return f"{group.group_id}t"
