"""Which rollout goes to which replica next: evaluations first, then the oldest group's pending rollouts, then a new group.

A rollout is bound to one replica and to the version that replica serves now. A replica is usable while it is UP and its version
is of the present lineage and has had its quorum; among the usable ones that are fresh enough the one with the least KV use is taken.

KV use is what each replica last reported, corrected by the attempts that came and went since, each counted as the mean attempt's
share. Where it is equal (nothing generates, nothing was reported yet) the fewest live attempts decide.
"""

from __future__ import annotations

import heapq

from hpcrl.coordinator.entities import LIVE, Attempt, Group, Replica, Rollout
from hpcrl.coordinator.ledger import Ledger
from hpcrl.protocol.states import State
from hpcrl.protocol.version import PolicyVersion

__all__ = ["Binder"]


class Binder:
    """Picks and binds. ``bind`` returns None when nothing can be bound now."""

    def __init__(self, ledger: Ledger) -> None:
        self._l = ledger

    # ------------------------------------------------------------ replicas

    def has_quorum(self, version: PolicyVersion) -> bool:
        """Whether so many replicas have reported READY(version) that new attempts may be bound to it; stays true afterwards."""
        known = self._l.versions.get(version)
        return known is not None and len(known.ready) >= (self._l.config.weights.quorum or 1)

    def given_up(self, version: PolicyVersion) -> str | None:
        """Why nothing will ever be bound to ``version``: too many replicas refused it for its quorum. None while it may still be."""
        known = self._l.versions.get(version)
        if known is None or not known.refused or self.has_quorum(version):
            return None
        replicas = max(len(self._l.replicas), self._l.config.inference.replicas)
        if replicas - len(known.refused) >= (self._l.config.weights.quorum or 1):
            return None
        reasons = "; ".join(f"replica {name}: {reason}" for name, reason in sorted(known.refused.items()))
        return f"version {version} was refused by {len(known.refused)} of {replicas} replicas ({reasons})"

    def usable(self) -> list[Replica]:
        lineage = self._l.position.lineage
        return [
            replica
            for replica in self._l.replicas.values()
            if replica.serving
            and replica.version is not None
            and replica.version.lineage == lineage
            and self.has_quorum(replica.version)
        ]

    @staticmethod
    def _least_loaded(usable: list[Replica], min_step: int) -> Replica | None:
        fresh = [r for r in usable if r.version is not None and r.version.step >= min_step]
        counted = sum(replica.kv_attempts for replica in usable)
        share = sum(replica.kv_use for replica in usable) / counted if counted else 0.0

        def load(replica: Replica) -> tuple[float, int, str]:
            kv_use = replica.kv_use + share * (len(replica.live) - replica.kv_attempts)
            return kv_use, len(replica.live), replica.replica_id

        return min(fresh, key=load, default=None)

    # ------------------------------------------------------------ rollouts

    def _needed_step(self, group: Group) -> int:
        """The oldest version step that a rollout of an existing group may be bound to."""
        return max(group.min_step, self._l.floor, self._l.staleness.oldest_usable_step(self._l.position.step))

    def needed_for_new(self) -> int | None:
        """The oldest version step that a new group may be bound to; None: the remaining steps need no further group."""
        needed = self._l.staleness.needed_step(self._l.position.step, self._l.unconsumed)
        return None if needed is None else max(needed, self._l.floor)

    def _next_eval(self, usable: list[Replica]) -> tuple[Rollout, Replica] | None:
        for version, run in self._l.evals.items():
            if run.active and run.pending:
                exact = [replica for replica in usable if replica.version == version]
                replica = self._least_loaded(exact, version.step)
                if replica is not None:
                    return run.pending.popleft(), replica
        return None

    def _next_pending(self, usable: list[Replica], aside: list[tuple[int, str]]) -> tuple[Rollout, Replica] | None:
        """The oldest group with a pending rollout that some replica is fresh enough for; the others go ``aside`` for this call."""
        heap = self._l.pending
        while heap:
            group = self._l.groups.get(heap[0][1])
            if group is None or not group.pending:
                heapq.heappop(heap)
                if group is not None:
                    group.queued = False
                continue
            replica = self._least_loaded(usable, self._needed_step(group))
            if replica is not None:
                return group.pending.popleft(), replica
            aside.append(heapq.heappop(heap))
        return None

    def _next_new(self, usable: list[Replica], now: float) -> tuple[Rollout, Replica] | None:
        """Admit a new group if one may still be consumed in time on a replica that is there now."""
        ledger = self._l
        needed = self.needed_for_new()
        if needed is None:
            return None
        replica = self._least_loaded(usable, needed)
        if replica is None:
            return None
        seq, place = ledger.next_seq, ledger.staleness.step_at(ledger.position.step, ledger.unconsumed)
        ledger.next_seq += 1
        group = Group(
            group_id=f"g{seq:06d}", seq=seq, split="train", task=ledger.order[seq], created_at=now, min_step=place
        )
        ledger.add_group(group, ledger.config.rollout.group_size)
        return group.pending.popleft(), replica

    def bind(self, worker_id: str, n: int, now: float) -> list[Attempt]:
        """Up to ``n`` fresh LEASED attempts for the worker."""
        ledger = self._l
        if ledger.finished is not None or ledger.given_up is not None or ledger.position.lineage < 0:
            return []
        usable = self.usable()
        attempts: list[Attempt] = []
        aside: list[tuple[int, str]] = []
        while usable and len(attempts) < n:
            pair = self._next_eval(usable) or self._next_pending(usable, aside) or self._next_new(usable, now)
            if pair is None:
                break
            attempts.append(self._attempt(*pair, worker_id, now))
        for entry in aside:
            heapq.heappush(ledger.pending, entry)
        return attempts

    def _attempt(self, rollout: Rollout, replica: Replica, worker_id: str, now: float) -> Attempt:
        if replica.version is None:
            raise ValueError(f"{replica.replica_id} serves no version")
        config = self._l.config
        attempt = Attempt(
            attempt_id=f"{rollout.rollout_id}-a{rollout.tries}",
            rollout=rollout,
            worker_id=worker_id,
            replica_id=replica.replica_id,
            version=replica.version,
            state=State.LEASED,
            leased_at=now,
            changed_at=now,
            lease_until=now + config.coordinator.lease_s,
            deadline_at=now + config.rollout.attempt_timeout_s,
        )
        self._l.add_attempt(attempt)
        return attempt

    def has_work_for(self, step: int) -> bool:
        """Whether a replica that serves a version at ``step`` could be given something to train on now."""
        ledger = self._l
        if ledger.finished is not None or ledger.position.lineage < 0:
            return False
        needed = self.needed_for_new()
        if needed is not None and needed <= step:
            return True
        waiting = (ledger.groups.get(group_id) for _, group_id in ledger.pending)
        return any(group is not None and group.pending and self._needed_step(group) <= step for group in waiting)

    def can_go_on(self) -> bool:
        """Whether samples for training are under way, or could be, with the newest version of this lineage that had its quorum."""
        ledger = self._l
        if any(a.rollout.group.split == "train" and a.state in LIVE for a in ledger.attempts.values()):
            return True
        had_quorum = [v.step for v in ledger.versions if v.lineage == ledger.position.lineage and self.has_quorum(v)]
        return bool(had_quorum) and self.has_work_for(max(had_quorum))
