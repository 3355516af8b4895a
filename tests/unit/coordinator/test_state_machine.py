"""The real service over real SQLite against the tiny model: any order of calls, repeated, delayed, with jumps of time and restarts."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coordinator_world import make_config, make_tasks, seal_item
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tiny_model import BOUND, LIVE, Model

from hpcrl.clock import ManualClock
from hpcrl.coordinator.check import check_database
from hpcrl.coordinator.database import open_database
from hpcrl.coordinator.queue import Queue
from hpcrl.coordinator.restore import restore
from hpcrl.coordinator.service import Service
from hpcrl.coordinator.store import Store
from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m
from hpcrl.protocol.status import StatusRequest

WORKERS = st.sampled_from(["w0", "w1"])
SCORERS = st.sampled_from(["s0", "s1"])
RAM = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # fsync is the disk's to test, not this one's

Check = Callable[[dict[str, Any]], None]


class CoordinatorMachine(RuleBasedStateMachine):
    """Every call goes through :meth:`send`, which remembers it, so that it can be repeated; reports may be held back and sent late."""

    @initialize(
        lag=st.integers(0, 2), group_size=st.integers(1, 3), per_step=st.integers(1, 2), retries=st.integers(0, 2)
    )
    def begin(self, lag: int, group_size: int, per_step: int, retries: int) -> None:
        self.config = make_config(
            staleness={"max_policy_lag": lag},
            rollout={"group_size": group_size, "attempt_timeout_s": 100.0},
            trainer={"steps": 50, "groups_per_step": per_step},
            coordinator={
                "lease_s": 30.0,
                "infra_retries": retries,
                "data_retries": 10_000,
                "redraws": 10_000,
                "failed_groups": 10_000,
            },
            scoring={"lease_s": 45.0},
        )
        self.model = Model(group_size, per_step, lag, 30.0, 100.0, 45.0, retries)
        self.folder = Path(tempfile.mkdtemp(prefix="hpcrl-machine-", dir=RAM))
        self.loop = asyncio.new_event_loop()
        self.clock = ManualClock(1000.0)
        self.sent: list[tuple[c.Endpoint, m.Message, str, bytes]] = []
        self.held: list[tuple[c.Endpoint, m.Message, Check]] = []
        self.bound: dict[str, str] = {}
        self.keys = 0
        self.open()
        self.send(c.REGISTER, m.ReplicaRegister(replica_id="r0", base_url="http://r0/v1", node="n"))
        self.start(0)

    def open(self) -> None:
        self.connection = open_database(self.folder / "c.db")
        self.queue = Queue(self.config, make_tasks(3), [], "secret")
        restore(self.queue, self.connection, self.clock.now())
        self.service = Service(self.queue, Store(self.connection), self.clock)
        self.loop.run_until_complete(self.service.start())
        # Time passes here only when a rule says so; on a busy machine the service's own ticker would find moments to run.
        assert self.service._ticker is not None
        self.service._ticker.cancel()

    def teardown(self) -> None:
        if not hasattr(self, "service"):
            return
        problems = self.loop.run_until_complete(self.service._store.call(check_database))
        self.loop.run_until_complete(self.service.close())
        self.loop.close()
        shutil.rmtree(self.folder)
        assert problems == []

    def send(self, endpoint: c.Endpoint, request: m.Message) -> dict[str, Any]:
        self.keys += 1
        reply = self.loop.run_until_complete(self.service.handle(endpoint, request, f"k{self.keys}"))
        if endpoint.mutates:
            self.sent.append((endpoint, request, f"k{self.keys}", reply))
        return json.loads(reply)

    def report(self, hold: bool, endpoint: c.Endpoint, request: m.Message, check: Check) -> None:
        """Send now, or keep for a moment that nobody expects."""
        if hold:
            self.held.append((endpoint, request, check))
        else:
            check(self.send(endpoint, request))

    def names(self, states: tuple[str, ...], data: st.DataObject) -> str:
        """An attempt, preferably in one of the states; now and then any, so that late and foreign reports are made."""
        fitting = [name for name, known in self.model.tries.items() if known.state in states]
        pool = fitting if fitting and data.draw(st.integers(0, 4)) else list(self.model.tries)
        return data.draw(st.sampled_from(pool))

    # ------------------------------------------------------------ workers

    @rule(worker=WORKERS, n=st.integers(1, 4))
    def lease(self, worker: str, n: int) -> None:
        for lease in self.send(c.LEASE, m.LeaseRequest(worker_id=worker, n=n, wait_s=0))["leases"]:
            self.bound[lease["attempt_id"]] = lease["policy_version"]
            step = int(lease["policy_version"].partition(".")[2])
            self.model.leased(lease["attempt_id"], worker, step, self.clock.now())

    @precondition(lambda self: self.model.tries)
    @rule(data=st.data(), worker=WORKERS, running=st.booleans())
    def heartbeat(self, data: st.DataObject, worker: str, running: bool) -> None:
        name = self.names(LIVE, data)
        beat = m.Heartbeat(worker_id=worker, attempt_ids=[name], running=[name] if running else [])
        cancelled = self.send(c.HEARTBEAT, beat)["cancelled"]
        if self.model.takes(name, worker, (*LIVE, "accepted")):
            known = self.model.tries[name]
            known.lease_until = self.clock.now() + self.model.lease_s
            if running and known.state == "leased":
                known.state = "running"
        fine = self.model.takes(name, worker, (*LIVE, "accepted")) or self.model.tries[name].state == "consumed"
        assert (name in cancelled) is not fine

    @precondition(lambda self: self.model.tries)
    @rule(data=st.data(), worker=WORKERS, hold=st.booleans())
    def artifact(self, data: st.DataObject, worker: str, hold: bool) -> None:
        name = self.names(BOUND, data)
        item = m.ArtifactItem(attempt_id=name, artifact="x", digest="d", environment_version="e")

        def check(ack: dict[str, Any]) -> None:
            assert (name in ack["accepted"]) is self.model.takes(name, worker, BOUND)
            if ack["accepted"]:
                self.model.tries[name].state = "artifact_ready"

        self.report(hold, c.ARTIFACT, m.ArtifactReport(worker_id=worker, items=[item]), check)

    @precondition(lambda self: self.model.tries)
    @rule(data=st.data(), worker=WORKERS, hold=st.booleans())
    def fail(self, data: st.DataObject, worker: str, hold: bool) -> None:
        name = self.names(LIVE, data)
        item = m.FailureItem(attempt_id=name, kind="infra", reason="node_lost")

        def check(ack: dict[str, Any]) -> None:
            assert (name in ack["accepted"]) is self.model.takes(name, worker, LIVE)
            if ack["accepted"]:
                self.model.fail(self.model.tries[name])

        self.report(hold, c.FAILED, m.FailureReport(reporter_id=worker, items=[item]), check)

    @precondition(lambda self: self.model.tries)
    @rule(data=st.data(), worker=WORKERS, hold=st.booleans())
    def seal(self, data: st.DataObject, worker: str, hold: bool) -> None:
        name = self.names(("scored",), data)
        item = seal_item(name, self.bound[name], self.clock.now())

        def check(ack: dict[str, Any]) -> None:
            assert (name in ack["accepted"]) is self.model.takes(name, worker, ("scored",))
            if ack["accepted"]:
                self.model.accept(self.model.tries[name])

        self.report(hold, c.SEALED, m.SealedReport(worker_id=worker, items=[item]), check)

    # ------------------------------------------------------------ scorers

    @rule(scorer=SCORERS, n=st.integers(1, 3))
    def lease_scoring(self, scorer: str, n: int) -> None:
        for lease in self.send(c.LEASE_SCORING, m.ScoringRequest(scorer_id=scorer, n=n, wait_s=0))["leases"]:
            known = self.model.tries[lease["attempt_id"]]
            assert known.state == "artifact_ready" and known.scorer is None
            known.scorer, known.scoring_until = scorer, self.clock.now() + self.model.scoring_s
            known.scoring_tries += 1

    @precondition(lambda self: self.model.tries)
    @rule(data=st.data(), scorer=SCORERS, hold=st.booleans())
    def score(self, data: st.DataObject, scorer: str, hold: bool) -> None:
        name = self.names(("artifact_ready",), data)
        item = m.ScoreItem(attempt_id=name, reward=1.0, rewards={}, verifier_version="v", scoring_s=1.0)

        def check(ack: dict[str, Any]) -> None:
            assert (name in ack["accepted"]) is self.model.takes_score(name, scorer)
            if ack["accepted"]:
                self.model.tries[name].state = "scored"

        self.report(hold, c.SCORED, m.ScoreReport(scorer_id=scorer, items=[item]), check)

    # ------------------------------------------------------------ trainer

    @rule(data=st.data(), flaw=st.sampled_from([None, None, "ratio", "shard"]))
    def batch(self, data: st.DataObject, flaw: str | None) -> None:
        version = f"{self.model.lineage}.{self.model.position}"
        expected = self.model.complete()[: self.model.per_step]
        groups = self.send(c.BATCH, m.BatchRequest(version=version, wait_s=0))["groups"]
        assert (groups is not None) is (len(expected) == self.model.per_step)
        if groups is None:
            return
        assert [group["group_id"] for group in groups] == expected
        names = [t["attempt_id"] for group in groups for t in group["trajectories"]]
        self.model.consume(set(names))
        assert self.send(c.BATCH, m.BatchRequest(version=version, wait_s=0))["groups"] == groups
        if flaw is None:
            self.serve()
            return
        spoiled = data.draw(st.sets(st.sampled_from(sorted(names)), min_size=1))
        if flaw == "ratio":
            self.send(c.OFF_POLICY, m.OffPolicy(version=version, deviations=dict.fromkeys(spoiled, 0.5)))
            self.model.give_back(spoiled, "cancelled")
            self.model.floor = self.model.position
        else:
            [name, *_] = sorted(spoiled)
            self.send(c.BAD_SHARD, m.BadShard(version=version, shard=f"shards/{name}.h5", reason="truncated"))
            self.model.give_back({name}, "infra_failed")

    @rule(back=st.integers(0, 3))
    def resume(self, back: int) -> None:
        self.start(max(0, self.model.position - back))

    def start(self, step: int) -> None:
        started = self.send(c.START, m.TrainerStart(checkpoint_step=step or None))
        self.model.start(step)
        assert started == {"lineage": self.model.lineage, "step": step}
        self.serve()

    def serve(self) -> None:
        """The replica serves the version that the next batch is for."""
        version = f"{self.model.lineage}.{self.model.position}"
        self.send(c.PUBLISHED, m.VersionPublished(version=version, digest="d", nbytes=1))
        for known in self.model.tries.values():
            if known.state in BOUND:  # a new engine behind the proxy: what talks to the old one is lost
                known.state = "lost"
        times = {"transfer_s": 0.0, "verify_s": 0.0, "pause_s": 0.0}
        self.send(c.READY, m.ReplicaReady(replica_id="r0", version=version, digest="d", **times))
        for known in self.model.tries.values():
            if known.state == "lost":
                self.model.fail(known)

    # ------------------------------------------------------------ trouble

    @rule(seconds=st.sampled_from([1.0, 20.0, 31.0, 46.0, 500.0]))
    def time_jumps(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.queue.tick(self.clock.now())
        self.service._flush()
        self.model.pass_time(self.clock.now())

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """A call whose answer was lost comes again: same answer, no effect."""
        recent = self.sent[-30:]
        endpoint, request, key, first = recent[data.draw(st.integers(0, len(recent) - 1))]
        before = self.queue.status(StatusRequest(), self.clock.now())
        assert self.loop.run_until_complete(self.service.handle(endpoint, request, key)) == first
        assert self.queue.status(StatusRequest(), self.clock.now()) == before

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def late(self, data: st.DataObject) -> None:
        endpoint, request, check = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        check(self.send(endpoint, request))

    @rule()
    def restart(self) -> None:
        before = self.queue.status(StatusRequest(), self.clock.now()).model_copy(update={"waits": []})
        # What changed nothing left no answer behind: asked again after a restart it is a new call.
        self.sent = [call for call in self.sent if not call[3].startswith(b'{"leases":[]')]
        self.loop.run_until_complete(self.service.close())
        self.open()
        # The answer that nothing is to be had is not kept: it had no effect, and who repeats the call may get something.
        self.sent = [call for call in self.sent if json.loads(call[-1]).get("leases") != []]
        assert self.queue.status(StatusRequest(), self.clock.now()).model_copy(update={"waits": []}) == before
        for known in self.model.tries.values():
            if known.state in LIVE:
                known.lease_until = self.clock.now() + self.model.lease_s
            if known.state == "artifact_ready" and known.scorer is not None:
                known.scoring_until = self.clock.now() + self.model.scoring_s

    # ------------------------------------------------------------ what always holds

    @invariant()
    def the_counts_are_the_models(self) -> None:
        if not hasattr(self, "service"):
            return
        status = self.queue.status(StatusRequest(), self.clock.now())
        counted = {state.value: n for state, n in status.attempts.items()}
        believed: dict[str, int] = {}
        for known in self.model.tries.values():
            believed[known.state] = believed.get(known.state, 0) + 1
        assert counted == believed
        assert status.consumed == believed.get("consumed", 0)


CoordinatorMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("HPCRL_MACHINE_EXAMPLES", "25")),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestCoordinator = CoordinatorMachine.TestCase
