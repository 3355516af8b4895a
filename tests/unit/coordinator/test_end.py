"""The end of a run, and opening it again."""

from __future__ import annotations

from coordinator_world import Harness, harness, make_config

from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m
from hpcrl.protocol.states import State


def test_finish_stops_everybody() -> None:
    world = harness()
    leases = world.lease(2)
    world.call(c.FINISH, m.Finish())
    assert world.call(c.LEASE, m.LeaseRequest(worker_id="w", n=1)).stop
    assert world.call(c.LEASE_SCORING, m.ScoringRequest(scorer_id="s", n=1)).stop
    reply = world.call(c.HEARTBEAT, m.Heartbeat(worker_id="w", attempt_ids=[leases[0].attempt_id]))
    assert reply.stop and reply.cancelled == {leases[0].attempt_id: "shutdown"}
    status = world.status()
    assert status.stopped and status.attempts == {State.CANCELLED: 2}


def test_a_reopened_run_leases_nothing_until_its_new_replicas_serve() -> None:
    """What the database remembers of replicas are the addresses of dead processes."""
    world = Harness(make_config())
    world.start()
    world.register("r0")
    world.publish("0.0", "r0")
    world.call(c.FINISH, m.Finish())
    world.restart()
    world.queue.reopen()
    world.save()
    assert world.lease(4) == []
    world.restart()
    assert world.lease(4) == []
    world.start(0)
    world.register("r0")
    world.publish("1.0", "r0")
    assert {lease.policy_version for lease in world.lease(4)} == {"1.0"}
