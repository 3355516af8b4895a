"""Versions that replicas refuse: what goes on with the old one, and when the trainer is told that it waits in vain."""

from __future__ import annotations

import pytest
from coordinator_world import Harness, make_config

from hpcrl.coordinator.ledger import Refused
from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m


def harness(*replicas: str, **sections: dict) -> Harness:
    """A started run whose replicas all serve 0.0."""
    world = Harness(make_config(**sections))
    world.register(*replicas or ("r0",))
    world.start()
    world.publish("0.0", *replicas or ("r0",))
    return world


def refuse(world: Harness, name: str, version: str) -> None:
    world.call(c.REFUSED, m.ReplicaRefused(replica_id=name, version=version, reason=f"disk of {name}"))


def test_after_a_failed_flip_ready_for_the_old_version_keeps_it_serving() -> None:
    world = harness(staleness={"max_policy_lag": 2}, trainer={"steps": 9})
    world.finish_attempts(world.lease(4))
    world.batch("0.0")
    world.finish_attempts(world.lease(4))
    world.publish("0.1")
    assert world.flip("r0", "0.1")
    world.ready("r0", "0.0")
    refuse(world, "r0", "0.1")
    assert world.status().replicas == {"r0": "up 0.0; refused 0.1: disk of r0"}
    assert world.batch("0.1").groups is not None
    assert {lease.policy_version for lease in world.lease(1)} == {"0.0"}


def test_no_batch_is_waited_for_when_all_replicas_refused_its_version() -> None:
    world = harness("r0", "r1")
    world.finish_attempts(world.lease(100))
    world.batch("0.0")
    world.publish("0.1")
    refuse(world, "r0", "0.1")
    assert world.batch("0.1").groups is None
    refuse(world, "r1", "0.1")
    expected = r"no batch for 0\.1.*version 0\.1 was refused by 2 of 2 replicas \(replica r0: disk of r0; replica r1: disk of r1\)"
    with pytest.raises(Refused, match=expected):
        world.batch("0.1")
    world.restart()
    with pytest.raises(Refused, match=expected):
        world.batch("0.1")
    world.ready("r1", "0.1")
    assert world.batch("0.1").groups is None


def test_a_version_that_cannot_reach_its_quorum_any_more_is_given_up() -> None:
    world = harness("r0", "r1", weights={"quorum": 2}, inference={"replicas": 2})
    world.finish_attempts(world.lease(100))
    world.batch("0.0")
    world.publish("0.1", "r0")
    assert world.batch("0.1").groups is None
    refuse(world, "r1", "0.1")
    with pytest.raises(Refused, match="refused by 1 of 2 replicas"):
        world.batch("0.1")


def test_a_refused_version_ends_nothing_while_the_old_one_may_still_be_trained_on() -> None:
    world = harness(staleness={"max_policy_lag": 1}, trainer={"steps": 9})
    world.finish_attempts(world.lease(4))
    world.batch("0.0")
    world.publish("0.1")
    refuse(world, "r0", "0.1")
    assert world.batch("0.1").groups is None
    leases = world.lease(100)
    assert {lease.policy_version for lease in leases} == {"0.0"}
    assert world.batch("0.1").groups is None
    world.finish_attempts(leases)
    assert world.batch("0.1").groups is not None
    assert world.batch("0.2").groups is None  # not published yet: it may still be served
    world.publish("0.2")
    refuse(world, "r0", "0.2")
    with pytest.raises(Refused, match=r"version 0\.2 was refused"):
        world.batch("0.2")


def test_no_evaluation_is_waited_for_when_all_replicas_refused_its_version() -> None:
    world = harness(staleness={"max_policy_lag": 2}, trainer={"steps": 9})
    world.finish_attempts(world.lease(4))
    world.batch("0.0")
    world.publish("0.1")
    world.call(c.EVAL, m.EvalRequest(version="0.1", samples=1))
    assert world.call(c.EVAL_STATUS, m.EvalStatusRequest(version="0.1")).done == 0
    refuse(world, "r0", "0.1")
    with pytest.raises(Refused, match=r"version 0\.1 was refused by 1 of 1 replicas \(replica r0: disk of r0\)"):
        world.call(c.EVAL_STATUS, m.EvalStatusRequest(version="0.1"))
