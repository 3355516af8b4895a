"""Who waits for whom and since when, in words: for ``hpcrl status``. Pure; reads the live state only.

Callers that got nothing are noted as asking (:class:`Asking`), replicas know their own waiting, and what holds a batch up is
followed from the group that is missing least down to the attempt, its worker and what that is doing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcrl.coordinator.entities import Group, Replica, ReplicaState, Rollout
from hpcrl.protocol.states import State
from hpcrl.protocol.status import Wait

if TYPE_CHECKING:
    from hpcrl.coordinator.binding import Binder
    from hpcrl.coordinator.ledger import Ledger

__all__ = ["Asking", "waits"]

_FORGOTTEN_S = 60.0
_SHOWN = 3


class Asking:
    """Callers whose last call of a kind brought nothing: (who, what) → since when, and when they last asked."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], tuple[float, float]] = {}

    def note(self, who: str, what: str, now: float, satisfied: bool) -> None:
        if satisfied:
            self._since.pop((who, what), None)
        else:
            since = self._since.get((who, what), (now, now))[0]
            self._since[who, what] = (since, now)

    def present(self, now: float) -> list[tuple[str, str, float]]:
        """(who, what, since) of those who still ask; a caller that is silent for a minute is taken to be gone."""
        self._since = {key: times for key, times in self._since.items() if now - times[1] <= _FORGOTTEN_S}
        return [(who, what, since) for (who, what), (since, _) in self._since.items()]


def waits(ledger: Ledger, binder: Binder, now: float) -> list[Wait]:
    """All that waits now, longest first."""
    found = []
    for who, what, since in ledger.asking.present(now):
        if what.startswith("batch"):
            why = _batch_reason(ledger, binder, now)
        elif what.startswith("evaluation"):
            why = _eval_reason(ledger, binder, now)
        else:
            why = _no_work_reason(ledger, binder)
        found.append(Wait(who=who, what=what, since=since, why=why))
    for replica in ledger.replicas.values():
        if replica.target is not None:
            found.append(_replica_wait(ledger, replica, now))
    return sorted(found, key=lambda wait: wait.since)


def _replica_wait(ledger: Ledger, replica: Replica, now: float) -> Wait:
    held = [_rollout_text(attempt.rollout, now) for attempt in replica.live.values()]
    needed = [_rollout_text(attempt.rollout, now) for attempt in ledger.pinning.blockers(replica)]
    if ledger.pinning.standby and needed:
        why = f"{len(needed)} attempts still need an older version: {'; '.join(needed[:_SHOWN])}"
    elif ledger.pinning.standby:
        why = "it loads the weights beside those it serves"
    elif replica.state is ReplicaState.UP:
        why = "other replicas switch first"
    elif replica.state is ReplicaState.FLIPPING:
        why = "its engine loads the weights"
    else:
        why = f"{len(held)} attempts still run on it: {'; '.join(held[:_SHOWN])}"
    since = replica.draining_since or replica.target_since
    return Wait(who=f"replica {replica.replica_id}", what=f"version {replica.target}", since=since, why=why)


def _batch_reason(ledger: Ledger, binder: Binder, now: float) -> str:
    wanted = ledger.staleness.groups_per_step
    text = f"{min(len(ledger.complete), wanted)} of {wanted} groups complete"
    unfinished = [group for group in ledger.groups.values() if group.split == "train" and group.state == "open"]
    if not unfinished:
        return f"{text}; {_no_work_reason(ledger, binder)}"
    nearest = min(unfinished, key=lambda group: (group.unended, group.seq))
    return f"{text}; {_group_text(nearest, ledger, binder, now)}"


def _eval_reason(ledger: Ledger, binder: Binder, now: float) -> str:
    unfinished = [group for group in ledger.groups.values() if group.split == "eval" and group.unended]
    if not unfinished:
        return "nothing"
    nearest = min(unfinished, key=lambda group: (group.unended, group.seq))
    return f"{len(unfinished)} tasks unfinished; {_group_text(nearest, ledger, binder, now)}"


def _group_text(group: Group, ledger: Ledger, binder: Binder, now: float) -> str:
    """``g000012 7/8: g000012-r3-a0 on cpu1-0 in tool call for 41 s``."""
    size = len(group.rollouts)
    missing = [rollout for rollout in group.rollouts if not rollout.ended]
    texts = [_rollout_text(rollout, now) for rollout in missing[:_SHOWN]]
    if any(rollout.state is State.PENDING for rollout in missing):
        texts.append(_no_work_reason(ledger, binder))
    return f"{group.group_id} {size - len(missing)}/{size}: {'; '.join(texts)}"


def _rollout_text(rollout: Rollout, now: float) -> str:
    attempt = rollout.attempt
    if attempt is None:
        return f"{rollout.rollout_id} is not leased"
    since = attempt.changed_at
    if attempt.state is State.ARTIFACT_READY:
        doing = "waits for a scorer" if attempt.scorer_id is None else f"is scored by {attempt.scorer_id}"
    elif attempt.state is State.SCORED:
        doing = f"waits for {attempt.worker_id} to seal its shard"
    elif attempt.phase:
        doing, since = f"on {attempt.worker_id} in {attempt.phase}", attempt.phase_since
    else:
        doing = f"on {attempt.worker_id} {attempt.state.value}"
    return f"{attempt.attempt_id} {doing} for {max(0.0, now - since):.0f} s"


def _no_work_reason(ledger: Ledger, binder: Binder) -> str:
    """Why a worker that asks now gets nothing."""
    if ledger.finished is not None:
        return "the run has ended"
    if ledger.given_up is not None:
        return f"the run is given up: {ledger.given_up}"
    if ledger.position.lineage < 0:
        return "no trainer has started"
    served = [replica.version.step for replica in binder.usable() if replica.version is not None]
    if not served:
        return "no replica serves a version of this lineage that had its quorum"
    needed = binder.needed_for_new()
    if needed is None:
        return "the remaining steps need no further group"
    if needed > max(served):
        return f"admission: another group needs version step {needed}, replicas serve {max(served)}"
    return "workers have no free slot"
