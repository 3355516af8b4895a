"""The worker's calls: start, lease, heartbeat, artifact, failed, scores, sealed.

A lease is kept alive by heartbeats from LEASED to SCORED, because the worker holds the attempt's record until it is sealed.
The wall-clock limit of an attempt covers LEASED and RUNNING, plus one lease of grace: the worker enforces it first.
"""

from __future__ import annotations

import heapq

from hpcrl.coordinator.binding import Binder
from hpcrl.coordinator.entities import BOUND, LIVE, Attempt
from hpcrl.coordinator.ledger import Ledger
from hpcrl.protocol import messages as m
from hpcrl.protocol.keys import AttemptKey, sign_attempt_key
from hpcrl.protocol.states import State
from hpcrl.protocol.version import PolicyVersion

__all__ = ["WorkerCalls"]

_GOOD_ENDS = frozenset({State.ACCEPTED.value, State.CONSUMED.value})


class WorkerCalls:
    def __init__(self, ledger: Ledger, binder: Binder) -> None:
        self._l = ledger
        self._binder = binder

    def start(self, request: m.ProcessStart, now: float) -> m.Empty:
        """What the worker of this name held before fails now, and not when its leases expire: it is started again when it has died."""
        for attempt in list(self._l.attempts.values()):
            if attempt.worker_id == request.name and attempt.state in LIVE:
                self._l.fail(attempt, "infra", "worker_died", now)
        return m.Empty()

    # ------------------------------------------------------------ lease

    def lease(self, request: m.LeaseRequest, now: float) -> m.LeaseReply:
        if self._l.finished is not None:
            return m.LeaseReply(stop=True)
        attempts = self._binder.bind(request.worker_id, request.n, now)
        self._l.asking.note(f"worker {request.worker_id}", "work", now, satisfied=bool(attempts))
        return m.LeaseReply(leases=[self._lease(attempt) for attempt in attempts])

    def _lease(self, attempt: Attempt) -> m.Lease:
        group, rollout = attempt.rollout.group, self._l.config.rollout
        version = str(attempt.version)
        pin = self._l.pinning.of_attempt(attempt)
        key = sign_attempt_key(self._l.secret, AttemptKey(attempt.attempt_id, version, attempt.replica_id, pin))
        return m.Lease(
            attempt_id=attempt.attempt_id,
            rollout_id=attempt.rollout.rollout_id,
            group_id=group.group_id,
            task_id=group.task.task_id,
            split=group.split,
            task_dir=group.task.task_dir,
            policy_version=version,
            replica_id=attempt.replica_id,
            base_url=self._l.replicas[attempt.replica_id].base_url,
            api_key=key,
            sampling=m.Sampling(temperature=rollout.temperature, max_tokens=rollout.max_tokens),
            deadline_at=attempt.deadline_at,
        )

    def heartbeat(self, request: m.Heartbeat, now: float) -> m.HeartbeatReply:
        until = now + self._l.config.coordinator.lease_s
        cancelled: dict[str, str] = {}
        for attempt_id in request.attempt_ids:
            attempt = self._own(attempt_id, request.worker_id)
            if isinstance(attempt, Attempt):
                attempt.lease_until = until
            elif attempt not in _GOOD_ENDS:
                cancelled[attempt_id] = attempt
        for attempt_id in request.running:
            attempt = self._own(attempt_id, request.worker_id)
            if isinstance(attempt, Attempt) and attempt.state is State.LEASED:
                self._l.move(attempt, State.RUNNING, now)
        for attempt_id, phase in request.phases.items():
            attempt = self._own(attempt_id, request.worker_id)
            if isinstance(attempt, Attempt):
                attempt.phase, attempt.phase_since = phase.name, phase.since
        return m.HeartbeatReply(cancelled=cancelled, stop=self._l.finished is not None)

    def _own(self, attempt_id: str, worker_id: str) -> Attempt | str:
        """The live or accepted attempt if it is this worker's, else why not."""
        attempt = self._l.attempts.get(attempt_id)
        if attempt is None:
            return self._l.ended.get(attempt_id, "unknown_attempt")
        return attempt if attempt.worker_id == worker_id else "not_yours"

    def _take(self, attempt_id: str, worker_id: str, states: frozenset[State]) -> Attempt | str:
        attempt = self._own(attempt_id, worker_id)
        if isinstance(attempt, Attempt) and attempt.state not in states:
            return f"attempt_is_{attempt.state.value}"
        return attempt

    # ------------------------------------------------------------ reports

    def artifact(self, request: m.ArtifactReport, now: float) -> m.Ack:
        accepted: list[str] = []
        rejected: dict[str, str] = {}
        for item in request.items:
            attempt = self._take(item.attempt_id, request.worker_id, BOUND)
            if isinstance(attempt, str):
                rejected[item.attempt_id] = attempt
                self._l.reject(item.attempt_id, "artifact", request.worker_id, attempt, now)
                continue
            attempt.artifact, attempt.digest = item.artifact, item.digest
            attempt.environment_version, attempt.policy_failure = item.environment_version, item.policy_failure
            if attempt.state is State.LEASED:
                self._l.move(attempt, State.RUNNING, now)
            self._l.move(attempt, State.ARTIFACT_READY, now)
            self._l.scoring[attempt.attempt_id] = attempt
            self._l.wakes.add("scoring")
            accepted.append(item.attempt_id)
        return m.Ack(accepted=accepted, rejected=rejected)

    def failed(self, request: m.FailureReport, now: float) -> m.Ack:
        accepted: list[str] = []
        rejected: dict[str, str] = {}
        for item in request.items:
            attempt = self._take(item.attempt_id, request.reporter_id, LIVE)
            if item.kind == "policy":
                attempt = "policy_failures_are_scored_through_an_artifact"
            if isinstance(attempt, str):
                rejected[item.attempt_id] = attempt
                self._l.reject(item.attempt_id, "failed", request.reporter_id, attempt, now)
                continue
            if item.reason == m.WORKER_LEFT:
                self._l.cancel(attempt, item.reason, now)
            else:
                self._l.fail(attempt, item.kind, item.reason, now, item.message)
            accepted.append(item.attempt_id)
        return m.Ack(accepted=accepted, rejected=rejected)

    def scores(self, request: m.ScoresRequest, now: float) -> m.ScoresReply:
        scores: list[m.ScoredAttempt] = []
        cancelled: dict[str, str] = {}
        for attempt_id in request.attempt_ids:
            attempt = self._own(attempt_id, request.worker_id)
            if isinstance(attempt, str):
                if attempt not in _GOOD_ENDS:
                    cancelled[attempt_id] = attempt
            elif attempt.state is State.SCORED and attempt.reward is not None:
                scores.append(
                    m.ScoredAttempt(
                        attempt_id=attempt_id,
                        reward=attempt.reward,
                        rewards=attempt.rewards,
                        verifier_version=attempt.verifier_version,
                        scoring_s=attempt.scoring_s,
                        policy_failure=attempt.policy_failure,
                    )
                )
        return m.ScoresReply(scores=scores, cancelled=cancelled)

    def sealed(self, request: m.SealedReport, now: float) -> m.Ack:
        accepted: list[str] = []
        rejected: dict[str, str] = {}
        for item in request.items:
            attempt = self._take(item.attempt_id, request.worker_id, frozenset({State.SCORED}))
            if isinstance(attempt, Attempt):
                problem = self._seal(attempt, item)
                if problem is None:
                    self._l.accept(attempt, now)
                    accepted.append(item.attempt_id)
                    continue
                self._l.fail(attempt, "data", problem, now)
                attempt = problem
            rejected[item.attempt_id] = attempt
            self._l.reject(item.attempt_id, "sealed", request.worker_id, attempt, now)
        return m.Ack(accepted=accepted, rejected=rejected)

    def _seal(self, attempt: Attempt, item: m.SealedItem) -> str | None:
        """Note where the trajectory stands, or say what is wrong with the report (a reason word)."""
        oldest, newest = PolicyVersion.parse(item.oldest_version), PolicyVersion.parse(item.newest_version)
        if not self._l.pinning.covers(attempt, oldest, newest):
            return "version_mismatch"
        if newest != attempt.version and newest not in self._l.versions:
            return "version_unknown"
        if not 0 <= item.trained_tokens <= item.tokens or item.row < 0 or not item.shard:
            return "bad_seal"
        attempt.shard, attempt.row = item.shard, item.row
        attempt.tokens, attempt.trained_tokens = item.tokens, item.trained_tokens
        attempt.oldest_version, attempt.newest_version = oldest, newest
        attempt.first_token_at = item.first_token_at
        return None

    # ------------------------------------------------------------ time

    def expire(self, now: float) -> None:
        """Give up attempts whose worker is silent, and those past their wall-clock limit and grace."""
        grace = self._l.config.coordinator.lease_s
        heap = self._l.leases
        while heap and heap[0][0] <= now:
            _, attempt_id = heapq.heappop(heap)
            attempt = self._l.attempts.get(attempt_id)
            if attempt is None or attempt.state not in LIVE:
                continue
            limit = attempt.deadline_at + grace if attempt.state in BOUND else float("inf")
            if attempt.lease_until <= now:
                self._l.fail(attempt, "infra", "lease_expired", now)
            elif limit <= now:
                self._l.fail(attempt, "infra", "attempt_timeout", now)
            else:
                heapq.heappush(heap, (min(attempt.lease_until, limit), attempt_id))
