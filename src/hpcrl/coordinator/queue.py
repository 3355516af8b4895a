"""The whole queue: every call of the protocol as a method of ``(request, now)``, the passing of time, and a status. Pure.

    worker_calls   scorer_calls   replica_calls   trainer_calls        one file per role
              binding (what goes where next)   staleness (arithmetic)
                          ledger (live state, primitive moves, wakes)
                  entities   tally (counters)   changes (rows for the store)

The service applies calls one at a time, stores ``take_changes()`` in one transaction with the answer, and wakes the waiting calls
named by ``take_wakes()``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from hpcrl.config import RunConfig
from hpcrl.coordinator.binding import Binder
from hpcrl.coordinator.changes import ChangeSet
from hpcrl.coordinator.entities import Group, Replica, ReplicaState, Task, Version
from hpcrl.coordinator.ledger import Ledger
from hpcrl.coordinator.replica_calls import ReplicaCalls
from hpcrl.coordinator.scorer_calls import ScorerCalls
from hpcrl.coordinator.trainer_calls import TrainerCalls, eval_result
from hpcrl.coordinator.waits import waits
from hpcrl.coordinator.worker_calls import WorkerCalls
from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m
from hpcrl.protocol.states import State
from hpcrl.protocol.status import Status, StatusRequest
from hpcrl.protocol.version import PolicyVersion

__all__ = ["Call", "Queue"]

K = TypeVar("K")
Call = Callable[[Any, float], m.Message]


class Queue:
    """``calls`` maps an endpoint's path to its method, all but START, BAD_SHARD and OFF_POLICY, which need groups from the store
    (:meth:`start`, :meth:`bad_shard`, :meth:`off_policy`), and HISTORY, which the store answers alone."""

    def __init__(
        self, config: RunConfig, train: list[Task], evaluation: list[Task], secret: str, run_id: str = "run"
    ) -> None:
        self.run_id = run_id
        self.ledger = Ledger(config, train, evaluation, secret)
        self.binder = binder = Binder(self.ledger)
        self.worker = WorkerCalls(self.ledger, binder)
        self.scorer = ScorerCalls(self.ledger)
        self.replicas = ReplicaCalls(self.ledger, binder)
        self.trainer = TrainerCalls(self.ledger, self.replicas, binder)
        self.calls: dict[str, Call] = {
            c.WORKER_START.path: self.worker.start,
            c.LEASE.path: self.worker.lease,
            c.HEARTBEAT.path: self.worker.heartbeat,
            c.ARTIFACT.path: self.worker.artifact,
            c.FAILED.path: self.worker.failed,
            c.SCORES.path: self.worker.scores,
            c.SEALED.path: self.worker.sealed,
            c.SCORER_START.path: self.scorer.start,
            c.LEASE_SCORING.path: self.scorer.lease,
            c.SCORED.path: self.scorer.scored,
            c.SCORING_FAILED.path: self.scorer.failed,
            c.REGISTER.path: self.replicas.register,
            c.FLIP.path: self.replicas.flip,
            c.LOAD.path: self.replicas.load,
            c.ENDED.path: self.replicas.ended,
            c.READY.path: self.replicas.ready,
            c.REFUSED.path: self.replicas.refused,
            c.PUBLISHED.path: self.trainer.published,
            c.BATCH.path: self.trainer.batch,
            c.CHECKPOINTED.path: self.trainer.checkpointed,
            c.EVAL.path: self.trainer.eval,
            c.EVAL_STATUS.path: self.trainer.eval_status,
            c.FINISH.path: self.finish,
            c.STATUS.path: self.status,
        }

    def start(self, request: m.TrainerStart, consumed_later: Iterable[Group], now: float) -> m.TrainerStarted:
        """START: see TrainerCalls.start."""
        return self.trainer.start(request, consumed_later, now)

    def bad_shard(self, request: m.BadShard, consumed: Iterable[Group], now: float) -> m.Empty:
        """BAD_SHARD: see TrainerCalls.bad_shard."""
        return self.trainer.bad_shard(request, consumed, now)

    def off_policy(self, request: m.OffPolicy, consumed: Iterable[Group], now: float) -> m.Empty:
        """OFF_POLICY: see TrainerCalls.off_policy."""
        return self.trainer.off_policy(request, consumed, now)

    def tick(self, now: float) -> None:
        """Let time pass: expired leases, overlong attempts, drains past their limit."""
        if self.ledger.finished is None:
            self.worker.expire(now)
            self.scorer.expire(now)
            self.replicas.expire(now)
            self.trainer.expire(now)

    def take_changes(self) -> ChangeSet | None:
        taken = self.ledger.changes.take()
        self.ledger.release()
        return taken

    def take_wakes(self) -> set[str]:
        wakes, self.ledger.wakes = self.ledger.wakes, set()
        return wakes

    # ------------------------------------------------------------ admin

    def finish(self, request: m.Finish, now: float) -> m.Empty:
        """The run is over: live attempts are cancelled, every role is told to stop. Complete groups stay for a resume."""
        if self.ledger.finished is None:
            self.ledger.set_finished(request.reason)
            for attempt in list(self.ledger.attempts.values()):
                if attempt.state is not State.ACCEPTED:
                    self.ledger.cancel(attempt, "shutdown", now)
        return m.Empty()

    def reopen(self) -> None:
        """Go on with a run whose roles have all ended (a resume). Its replicas are gone: they serve nothing until they register."""
        self.ledger.set_finished(None)
        self.ledger.set_given_up(None)
        for replica in self.ledger.replicas.values():
            replica.version, replica.state, replica.target = None, ReplicaState.UP, None
            self.ledger.changes.replica(replica)

    def status(self, request: StatusRequest, now: float) -> Status:
        """A snapshot. ``duplicates`` is the store's to count (it has every consumption); 0 here."""
        ledger, tally = self.ledger, self.ledger.tally
        quorum = ledger.config.weights.quorum or 1
        served = [version for version, known in ledger.versions.items() if len(known.ready) >= quorum]
        return Status(
            run_id=self.run_id,
            step=ledger.position.step,
            version=str(max(served)) if served else None,
            stopped=ledger.finished is not None,
            attempts=_present(tally.attempts),
            rollouts=_present(tally.rollouts),
            failures=_present(tally.failures),
            cancelled=_present(tally.cancelled),
            rejected_reports=_present(tally.rejected),
            replicas={r.replica_id: _replica_text(r, ledger.versions) for r in ledger.replicas.values()},
            in_flight=tally.in_flight,
            accepted_unused=tally.accepted_unused,
            scoring_backlog=tally.attempts[State.ARTIFACT_READY],
            lag_histogram=dict(sorted(_present(tally.lag).items())),
            consumed=tally.consumed,
            duplicates=0,
            eval=[eval_result(run) for run in ledger.evals.values() if not run.cancelled],
            recent_reward=tally.recent_reward,
            groups=_present(tally.groups),
            waits=waits(ledger, self.binder, now),
            versions=[_version_entry(version) for version in ledger.versions.values()],
        )


def _present(counter: Counter[K]) -> dict[K, int]:
    return {item: n for item, n in counter.items() if n}


def _replica_text(replica: Replica, versions: dict[PolicyVersion, Version]) -> str:
    """``up 0.3``, and why it serves no later version if it refused one: ``up 0.3; refused 0.4: held_weights: …``."""
    text = f"{replica.state.value} {replica.version or 'nothing'}"
    refused = [version for version, known in versions.items() if replica.replica_id in known.refused]
    last = max(refused, default=None)
    if last is None or (replica.version is not None and replica.version >= last):
        return text
    return f"{text}; refused {last}: {versions[last].refused[replica.replica_id]}"


def _version_entry(version: Version) -> dict[str, float | str | dict[str, str]]:
    entry: dict[str, float | str | dict[str, str]] = {
        "version": str(version.version),
        "digest": version.digest,
        "published_at": version.published_at,
        "pause_s": version.pause_s,
        "transfer_s": version.transfer_s,
        "digests": dict(version.ready),
    }
    if version.publish_s is not None:
        entry["publish_s"] = version.publish_s
    if version.refused:
        entry["refused"] = dict(version.refused)
    return entry
