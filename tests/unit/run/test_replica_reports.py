"""What a replica reports when flips fail and its engine dies; told to a real queue where the outcome there matters."""

from __future__ import annotations

from typing import Any

from coordinator_world import Harness, make_config

from hpcrl.protocol import client as api
from hpcrl.protocol import messages as m
from hpcrl.run.replica_reports import ReplicaReports


class Engine:
    def __init__(self) -> None:
        self.served_version: str | None = None
        self.serving = False


class Bench:
    """A started run with one replica that reports to the queue; 0.0 is published."""

    def __init__(self, **sections: Any) -> None:
        self.world = Harness(make_config(**sections))
        self.engine = Engine()
        self.said: list[tuple[str, str]] = []
        self.reports = ReplicaReports(self, self.engine, "r0")
        self.reports.register("http://r0/v1", "n")
        self.world.start()
        self.world.publish("0.0")

    def call(self, endpoint: api.Endpoint, request: Any) -> Any:
        self.said.append((endpoint.path.rpartition("/")[2], getattr(request, "version", "")))
        return self.world.call(endpoint, request)

    def serve(self, version: str) -> None:
        assert self.world.flip("r0", version)
        self.engine.served_version, self.engine.serving = version, True
        ready = m.ReplicaReady(
            replica_id="r0", version=version, digest=f"d{version}", transfer_s=1.0, verify_s=1.0, pause_s=1.0
        )
        self.reports.ready(ready)

    def replica(self) -> str:
        return self.world.status().replicas["r0"]


def test_after_a_failed_flip_the_old_version_is_leased_again() -> None:
    b = Bench(staleness={"max_policy_lag": 2}, trainer={"steps": 9})
    b.serve("0.0")
    b.world.finish_attempts(b.world.lease(4))
    b.world.batch("0.0")
    b.world.publish("0.1")
    assert b.world.flip("r0", "0.1")
    b.reports.refused("0.1", "disk")
    assert b.said[-2:] == [("ready", "0.0"), ("refused", "0.1")]
    assert b.replica() == "up 0.0; refused 0.1: disk"
    assert {lease.policy_version for lease in b.world.lease(2)} == {"0.0"}
    assert b.world.status().versions[0]["digests"] == {"r0": "d0.0"}


def test_a_replica_that_never_served_only_refuses() -> None:
    b = Bench()
    b.reports.refused("0.0", "disk")
    assert b.said == [("register", ""), ("refused", "0.0")]


def test_an_engine_that_a_failed_flip_left_broken_is_not_said_to_serve() -> None:
    b = Bench()
    b.serve("0.0")
    b.engine.serving = False
    b.reports.refused("0.0", "disk")
    assert b.said[-1] == ("refused", "0.0") and b.said.count(("ready", "0.0")) == 1


def test_a_broken_flip_is_told_before_the_old_version_is_loaded_again() -> None:
    b = Bench(staleness={"max_policy_lag": 2}, trainer={"steps": 9})
    b.serve("0.0")
    b.world.finish_attempts(b.world.lease(4))
    b.world.batch("0.0")
    b.world.publish("0.1")
    assert b.world.flip("r0", "0.1")
    b.engine.serving = False
    b.reports.broken("0.1", "held_weights: lm_head differs")
    assert b.replica() == "up nothing; refused 0.1: held_weights: lm_head differs"
    assert b.world.lease(2) == []
    b.engine.serving = True
    b.reports.refused("0.1", "held_weights: lm_head differs")
    assert b.replica() == "up 0.0; refused 0.1: held_weights: lm_head differs"
    assert {lease.policy_version for lease in b.world.lease(2)} == {"0.0"}


def test_nothing_is_leased_to_a_dead_engine_until_it_is_back() -> None:
    b = Bench()
    b.serve("0.0")
    lost = b.world.lease(2)
    b.engine.serving = False
    b.reports.down()
    assert b.world.status().failures == {"infra:replica_lost": 2}
    assert b.world.lease(2) == []
    b.engine.serving = True
    b.reports.restarted()
    assert b.replica() == "up 0.0"
    assert [lease.rollout_id for lease in b.world.lease(2)] != []
    assert b.world.status().versions[0]["pause_s"] == 1.0
    assert {lease.attempt_id for lease in lost}.isdisjoint(b.world.queue.ledger.attempts)


def test_a_death_right_after_a_flip_is_not_overtaken_by_its_ready() -> None:
    b = Bench()
    b.serve("0.0")
    b.world.finish_attempts(b.world.lease(4))
    b.world.batch("0.0")
    b.world.publish("0.1")
    assert b.world.flip("r0", "0.1")
    b.engine.served_version, b.engine.serving = "0.1", False
    b.reports.down()
    b.reports.restarted()
    b.reports.ready(m.ReplicaReady(replica_id="r0", version="0.1", digest="d", transfer_s=1, verify_s=1, pause_s=1))
    assert b.replica() == "up nothing"
    b.engine.serving = True
    b.reports.restarted()
    assert b.replica() == "up 0.1"


def test_a_death_before_the_registration_needs_no_report() -> None:
    engine = Engine()
    b = Bench()
    reports = ReplicaReports(b, engine, "r1")
    before = list(b.said)
    reports.down()
    reports.restarted()
    assert b.said == before
