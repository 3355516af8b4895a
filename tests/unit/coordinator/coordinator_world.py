"""A small simulated run on the real queue: workers, scorers, replicas and a trainer that act at random, one second per tick.

Every change set is written to SQLite, so that the queue can be thrown away and restored at any tick.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hpcrl.config import RunConfig, parse_config
from hpcrl.coordinator.database import create_tables
from hpcrl.coordinator.entities import Task
from hpcrl.coordinator.ledger import Refused
from hpcrl.coordinator.queue import Queue
from hpcrl.coordinator.restore import count_duplicates, groups_consumed_after, restore
from hpcrl.coordinator.store import write_changes
from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m
from hpcrl.protocol.status import Status, StatusRequest
from hpcrl.protocol.version import PolicyVersion

Rep = TypeVar("Rep", bound=m.Message)


def make_config(**sections: dict[str, Any]) -> RunConfig:
    """A small run; keyword sections override single keys, e.g. ``trainer={"steps": 3}``."""
    data: dict[str, Any] = {
        "model": {"path": "m"},
        "tasks": {"train": "t"},
        "rollout": {"group_size": 2, "attempt_timeout_s": 100},
        "staleness": {"max_policy_lag": 0},
        "trainer": {"steps": 3, "groups_per_step": 2},
        "coordinator": {"lease_s": 30, "infra_retries": 3},
    }
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values}
    return parse_config(data)


def make_tasks(n: int, prefix: str = "t") -> list[Task]:
    return [Task(f"{prefix}{i}", f"/tasks/{prefix}{i}") for i in range(n)]


def memory_database() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    create_tables(connection)
    return connection


class Harness:
    """Calls on a queue with a hand-moved clock; changes go to a database after every call."""

    def __init__(self, config: RunConfig, tasks: int = 5, eval_tasks: int = 2) -> None:
        self.config = config
        self.tasks, self.eval_tasks = make_tasks(tasks), make_tasks(eval_tasks, "e")
        self.db = memory_database()
        self.now = 1000.0
        self.queue = Queue(config, self.tasks, self.eval_tasks, "secret")

    def call(self, endpoint: c.Endpoint[Any, Rep], request: m.Message) -> Rep:
        if isinstance(request, m.TrainerStart):
            after = groups_consumed_after(self.db, request.checkpoint_step or 0)
            reply: Any = self.queue.start(request, after, self.now)
        elif isinstance(request, m.BadShard | m.OffPolicy):
            after = groups_consumed_after(self.db, PolicyVersion.parse(request.version).step)
            given_back: Any = self.queue.bad_shard if isinstance(request, m.BadShard) else self.queue.off_policy
            reply = given_back(request, after, self.now)
        else:
            reply = self.queue.calls[endpoint.path](request, self.now)
        self.save()
        return endpoint.reply.model_validate_json(reply.model_dump_json())

    def save(self) -> None:
        changes = self.queue.take_changes()
        if changes is not None:
            write_changes(self.db, changes)
        self.queue.take_wakes()

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.queue.tick(self.now)
        self.save()

    def restart(self) -> None:
        self.queue = Queue(self.config, self.tasks, self.eval_tasks, "secret")
        restore(self.queue, self.db, self.now)

    def status(self) -> Status:
        return self.call(c.STATUS, StatusRequest()).model_copy(update={"duplicates": count_duplicates(self.db)})

    # ---- single steps used by the tests

    def start(self, checkpoint: int | None = None) -> PolicyVersion:
        started = self.call(c.START, m.TrainerStart(checkpoint_step=checkpoint))
        return PolicyVersion(started.lineage, started.step)

    def register(self, *names: str) -> None:
        for name in names:
            self.call(c.REGISTER, m.ReplicaRegister(replica_id=name, base_url=f"http://{name}/v1", node="n"))

    def publish(self, version: str, *replicas: str) -> None:
        self.call(c.PUBLISHED, m.VersionPublished(version=version, digest="d", nbytes=1))
        for name in replicas:
            assert self.flip(name, version)
            self.ready(name, version)

    def flip(self, name: str, version: str) -> bool:
        return self.call(c.FLIP, m.FlipRequest(replica_id=name, version=version)).granted

    def ready(self, name: str, version: str) -> None:
        timings = {"transfer_s": 1.0, "verify_s": 0.1, "pause_s": 0.2}
        self.call(c.READY, m.ReplicaReady(replica_id=name, version=version, digest="d", **timings))

    def lease(self, n: int, worker: str = "w") -> list[m.Lease]:
        return self.call(c.LEASE, m.LeaseRequest(worker_id=worker, n=n)).leases

    def artifact(self, *attempts: str, worker: str = "w") -> m.Ack:
        items = [m.ArtifactItem(attempt_id=a, artifact="x", digest="d", environment_version="e") for a in attempts]
        return self.call(c.ARTIFACT, m.ArtifactReport(worker_id=worker, items=items))

    def score(self, reward: float = 1.0, n: int = 1000, scorer: str = "s") -> list[str]:
        leases = self.call(c.LEASE_SCORING, m.ScoringRequest(scorer_id=scorer, n=n)).leases
        return self.scored(*[lease.attempt_id for lease in leases], reward=reward, scorer=scorer).accepted

    def scored(self, *attempts: str, reward: float = 1.0, scorer: str = "s") -> m.Ack:
        item = {"reward": reward, "rewards": {"reward": reward}, "verifier_version": "v", "scoring_s": 1.0}
        items = [m.ScoreItem(attempt_id=attempt, **item) for attempt in attempts]
        return self.call(c.SCORED, m.ScoreReport(scorer_id=scorer, items=items))

    def seal(self, *leases: m.Lease, worker: str = "w") -> m.Ack:
        items = [seal_item(lease.attempt_id, lease.policy_version, self.now) for lease in leases]
        return self.call(c.SEALED, m.SealedReport(worker_id=worker, items=items))

    def finish_attempts(self, leases: list[m.Lease], worker: str = "w") -> None:
        """From LEASED to ACCEPTED."""
        self.artifact(*[lease.attempt_id for lease in leases], worker=worker)
        self.score()
        self.seal(*leases, worker=worker)

    def fail(self, *attempts: str, kind: Any = "infra", reason: str = "node_lost", worker: str = "w") -> m.Ack:
        items = [m.FailureItem(attempt_id=attempt, kind=kind, reason=reason) for attempt in attempts]
        return self.call(c.FAILED, m.FailureReport(reporter_id=worker, items=items))

    def batch(self, version: str) -> m.Batch:
        return self.call(c.BATCH, m.BatchRequest(version=version))


def harness(*replicas: str, **sections: dict[str, Any]) -> Harness:
    """A started run whose replicas all serve 0.0."""
    world = Harness(make_config(**sections))
    world.register(*replicas or ("r0",))
    world.start()
    world.publish("0.0", *replicas or ("r0",))
    return world


def beat(world: Harness, *attempts: str, worker: str = "w", running: bool = False) -> dict[str, str]:
    request = m.Heartbeat(worker_id=worker, attempt_ids=list(attempts), running=list(attempts) if running else [])
    return world.call(c.HEARTBEAT, request).cancelled


def seal_item(attempt_id: str, version: str, now: float) -> m.SealedItem:
    place = {"shard": f"shards/{attempt_id}.h5", "row": 0, "tokens": 10, "trained_tokens": 5}
    span = {"oldest_version": version, "newest_version": version, "first_token_at": now}
    return m.SealedItem(attempt_id=attempt_id, **place, **span)


@dataclass
class Odds:
    """Chances per tick of what goes wrong."""

    fail: float = 0.0
    silent: float = 0.0
    restart: float = 0.0
    refuse: float = 0.0
    far: float = 0.0


@dataclass
class World(Harness):
    """Runs to the end or gives up after ``limit`` ticks. ``batches``: version → the batch that was trained."""

    config: RunConfig
    seed: int
    odds: Odds
    replicas: int = 2
    slots: int = 6
    crash_at: int | None = None
    evaluates: bool = False
    batches: dict[str, m.Batch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Harness.__init__(self, self.config)
        self.rng = random.Random(self.seed)
        self.running: dict[str, m.Lease] = {}
        self.sealing: dict[str, m.Lease] = {}
        self.names = [f"r{i}" for i in range(self.replicas)]
        self.checkpoint: int | None = None
        self.ticks = 0

    def run(self, limit: int = 5000) -> None:
        self.register(*self.names)
        trainer = self._trainer()
        for self.ticks in range(limit):
            if next(trainer, "end") == "end":
                return
            if self.ticks == self.crash_at:
                # The combined step dies: replicas and trainer start again from the last checkpoint.
                self.register(*self.names)
                trainer = self._trainer(resume=True)
            self._replicas_act()
            self._worker_acts()
            self._scorer_acts()
            self.tick(1.0)
            if self.rng.random() < self.odds.restart:
                self.restart()
        raise AssertionError(f"no end after {limit} ticks: {self.status()}")

    def _trainer(self, resume: bool = False) -> Iterator[str]:
        version = self.start(self.checkpoint if resume else None)
        while True:
            self.call(c.PUBLISHED, m.VersionPublished(version=str(version), digest="d", nbytes=1))
            self.newest = str(version)
            if self.evaluates and (version.step == 0 or self.rng.random() < 0.5):
                self.call(c.EVAL, m.EvalRequest(version=str(version), samples=2))
                while not self._evaluated(str(version)):
                    yield "evaluating"
            if version.step == self.config.trainer.steps:
                return
            while (batch := self._batch_or_hope(str(version))) is None or batch.groups is None or self._far(batch):
                yield "waiting"
            if self.rng.random() < 0.3:
                assert self.batch(str(version)) == batch
            self.batches[str(version)] = batch
            for _ in range(self.rng.randrange(4)):
                yield "training"
            version = PolicyVersion(version.lineage, version.step + 1)
            if version.step % 2 == 0:
                self.call(c.CHECKPOINTED, m.CheckpointDone(version=str(version)))
                self.checkpoint = version.step

    def _batch_or_hope(self, version: str) -> m.Batch | None:
        """A real trainer ends when all replicas refused the version; here they try again."""
        try:
            return self.batch(version)
        except Refused as error:
            if "was refused by" not in str(error):
                raise
            return None

    def _far(self, batch: m.Batch) -> bool:
        """Whether the batch is given back, because some of its older trajectories are too far from the weights of today."""
        older = [
            reference.attempt_id
            for group in batch.groups or ()
            for reference in group.trajectories
            if reference.oldest_version != batch.version and self.rng.random() < self.odds.far
        ]
        if older:
            deviations = dict.fromkeys(older, 0.5)
            self.call(c.OFF_POLICY, m.OffPolicy(version=batch.version, deviations=deviations))
        return bool(older)

    def _evaluated(self, version: str) -> bool:
        try:
            result = self.call(c.EVAL_STATUS, m.EvalStatusRequest(version=version))
        except Refused as error:
            if "was refused by" not in str(error):
                raise
            return False
        return result.done == result.total

    def _replicas_act(self) -> None:
        for name in self.names:
            replica = self.queue.ledger.replicas[name]
            if str(replica.version) == self.newest or self.rng.random() < 0.5:
                continue
            if self.rng.random() < self.odds.refuse:
                refusal = m.ReplicaRefused(replica_id=name, version=self.newest, reason="digest")
                self.call(c.REFUSED, refusal)
            elif self.flip(name, self.newest):
                self.ready(name, self.newest)

    def _worker_acts(self) -> None:
        known = [*self.running, *self.sealing]
        beat = self.call(c.HEARTBEAT, m.Heartbeat(worker_id="w", attempt_ids=known, running=list(self.running)))
        for attempt in beat.cancelled:
            self.running.pop(attempt, None)
            self.sealing.pop(attempt, None)
        for lease in self.lease(self.slots - len(self.running)) if len(self.running) < self.slots else []:
            self.running[lease.attempt_id] = lease
        for attempt in list(self.running):
            chance = self.rng.random()
            if chance < self.odds.fail:
                self.fail(attempt)
                del self.running[attempt]
            elif chance < self.odds.fail + self.odds.silent:
                del self.running[attempt]
            elif chance > 0.7 and attempt in self.artifact(attempt).accepted:
                self.sealing[attempt] = self.running.pop(attempt)
        scores = self.call(c.SCORES, m.ScoresRequest(worker_id="w", attempt_ids=list(self.sealing)))
        ready = [self.sealing.pop(score.attempt_id) for score in scores.scores]
        if ready:
            self.call(c.SEALED, m.SealedReport(worker_id="w", items=[self._sealed(lease) for lease in ready]))

    def _sealed(self, lease: m.Lease) -> m.SealedItem:
        """Under the pins of turn and token an attempt may have seen each version that its replica served since."""
        bound = PolicyVersion.parse(lease.policy_version)
        served = self.queue.ledger.replicas[lease.replica_id].version
        seen = [bound]
        if self.config.weights.pin != "trajectory" and served is not None and served.lineage == bound.lineage:
            seen = sorted(self.rng.choices([bound, max(bound, served)], k=2))
        item = seal_item(lease.attempt_id, str(seen[0]), self.now)
        return item.model_copy(update={"newest_version": str(seen[-1])})

    def _scorer_acts(self) -> None:
        if self.rng.random() < 0.8:
            self.score(n=self.rng.randrange(1, 6))
