"""The scorer's calls: start, lease, scored, failed.

A scoring lease has no heartbeat; past its deadline, or when its scorer was started again, another scorer may take it.
"""

from __future__ import annotations

import heapq
import math

from hpcrl.coordinator.entities import Attempt
from hpcrl.coordinator.ledger import Ledger
from hpcrl.protocol import messages as m
from hpcrl.protocol.states import State

__all__ = ["ScorerCalls"]


class ScorerCalls:
    def __init__(self, ledger: Ledger) -> None:
        self._l = ledger

    def start(self, request: m.ProcessStart, now: float) -> m.Empty:
        """What the scorer of this name held before is offered again at once: it is started again when it has died."""
        for attempt in list(self._l.attempts.values()):
            if attempt.scorer_id == request.name and attempt.state is State.ARTIFACT_READY:
                self._release(attempt, "scorer_died", now)
        return m.Empty()

    def lease(self, request: m.ScoringRequest, now: float) -> m.ScoringReply:
        ledger = self._l
        if ledger.finished is not None:
            return m.ScoringReply(stop=True)
        until = now + ledger.config.scoring.lease_s
        leases: list[m.ScoringLease] = []
        while ledger.scoring and len(leases) < request.n:
            attempt_id, attempt = ledger.scoring.popitem(last=False)
            attempt.scorer_id, attempt.scoring_until = request.scorer_id, until
            attempt.scoring_tries += 1
            ledger.changes.attempt(attempt)
            heapq.heappush(ledger.scoring_leases, (until, attempt_id))
            leases.append(_lease(attempt))
        return m.ScoringReply(leases=leases)

    def _take(self, attempt_id: str, scorer_id: str) -> Attempt | str:
        """The attempt if this scorer holds its lease, else why not."""
        attempt = self._l.attempts.get(attempt_id)
        if attempt is None:
            return self._l.ended.get(attempt_id, "unknown_attempt")
        if attempt.state is not State.ARTIFACT_READY:
            return f"attempt_is_{attempt.state.value}"
        return attempt if attempt.scorer_id == scorer_id else "scoring_lease_expired"

    def scored(self, request: m.ScoreReport, now: float) -> m.Ack:
        accepted: list[str] = []
        rejected: dict[str, str] = {}
        for item in request.items:
            attempt = self._take(item.attempt_id, request.scorer_id)
            if isinstance(attempt, str):
                rejected[item.attempt_id] = attempt
                self._l.reject(item.attempt_id, "scored", request.scorer_id, attempt, now)
                continue
            if not math.isfinite(item.reward):
                rejected[item.attempt_id] = "reward_not_finite"
                self._l.fail(attempt, "data", "reward_not_finite", now)
                continue
            attempt.reward, attempt.rewards = item.reward, dict(item.rewards)
            attempt.verifier_version, attempt.scoring_s = item.verifier_version, item.scoring_s
            attempt.policy_failure = item.policy_failure or attempt.policy_failure
            self._l.move(attempt, State.SCORED, now)
            self._l.wakes.add(f"scores:{attempt.worker_id}")
            accepted.append(item.attempt_id)
        return m.Ack(accepted=accepted, rejected=rejected)

    def failed(self, request: m.FailureReport, now: float) -> m.Ack:
        accepted: list[str] = []
        rejected: dict[str, str] = {}
        for item in request.items:
            attempt = self._take(item.attempt_id, request.reporter_id)
            if item.kind == "policy":
                attempt = "policy_failures_are_scored"
            if isinstance(attempt, str):
                rejected[item.attempt_id] = attempt
                self._l.reject(item.attempt_id, "scoring_failed", request.reporter_id, attempt, now)
                continue
            self._l.fail(attempt, item.kind, item.reason, now, item.message)
            accepted.append(item.attempt_id)
        return m.Ack(accepted=accepted, rejected=rejected)

    def expire(self, now: float) -> None:
        """Offer attempts of silent scorers again; after too many silent ones the attempt fails."""
        heap = self._l.scoring_leases
        while heap and heap[0][0] <= now:
            until, attempt_id = heapq.heappop(heap)
            attempt = self._l.attempts.get(attempt_id)
            if attempt is None or attempt.state is not State.ARTIFACT_READY or attempt.scoring_until != until:
                continue
            self._release(attempt, "scoring_lease_expired", now)

    def _release(self, attempt: Attempt, reason: str, now: float) -> None:
        """Offer the attempt to another scorer; after too many that were lost it fails."""
        attempt.scorer_id, attempt.scoring_until = None, 0.0
        if attempt.scoring_tries > self._l.config.coordinator.infra_retries:
            self._l.fail(attempt, "infra", reason, now)
        else:
            self._l.scoring[attempt.attempt_id] = attempt
            self._l.changes.attempt(attempt)
            self._l.wakes.add("scoring")


def _lease(attempt: Attempt) -> m.ScoringLease:
    task = attempt.rollout.group.task
    return m.ScoringLease(
        attempt_id=attempt.attempt_id,
        task_id=task.task_id,
        task_dir=task.task_dir,
        artifact=attempt.artifact,
        digest=attempt.digest,
        policy_failure=attempt.policy_failure,
        deadline_at=attempt.scoring_until,
    )
