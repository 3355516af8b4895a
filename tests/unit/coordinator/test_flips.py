"""When a replica may switch versions."""

from __future__ import annotations

from coordinator_world import harness

from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m


def test_a_replica_drains_before_it_flips_and_gets_nothing_new_meanwhile() -> None:
    world = harness(staleness={"max_policy_lag": 2}, trainer={"steps": 9})
    leases = world.lease(6)
    world.finish_attempts(leases[:4])
    world.batch("0.0")
    world.publish("0.1")
    assert not world.flip("r0", "0.1")
    assert world.lease(1) == []
    assert world.status().replicas == {"r0": "draining 0.0"}
    world.artifact(*[lease.attempt_id for lease in leases[4:]])
    assert world.flip("r0", "0.1")
    assert world.status().replicas == {"r0": "flipping 0.0"}
    world.ready("r0", "0.1")
    assert {lease.policy_version for lease in world.lease(1)} == {"0.1"}


def test_replicas_roll_so_that_one_keeps_serving() -> None:
    world = harness("r0", "r1", staleness={"max_policy_lag": 2}, trainer={"steps": 9})
    world.finish_attempts(world.lease(4))
    world.batch("0.0")
    world.publish("0.1")
    assert world.flip("r0", "0.1")
    assert not world.flip("r1", "0.1")
    assert {lease.replica_id for lease in world.lease(1)} == {"r1"}
    world.ready("r0", "0.1")
    assert not world.flip("r1", "0.1")
    assert {lease.replica_id for lease in world.lease(1)} == {"r0"}


def test_at_lag_0_all_replicas_flip_at_once() -> None:
    world = harness("r0", "r1", "r2")
    world.finish_attempts(world.lease(4))
    world.batch("0.0")
    world.publish("0.1")
    assert [world.flip(name, "0.1") for name in ("r0", "r1", "r2")] == [True] * 3


def test_a_drain_past_its_limit_cancels_what_still_runs_without_blame() -> None:
    world = harness(
        staleness={"max_policy_lag": 2},
        trainer={"steps": 9},
        weights={"drain_timeout_s": 25.0},
        rollout={"group_size": 2, "attempt_timeout_s": 25.0},
    )
    leases = world.lease(6)
    world.finish_attempts(leases[:4])
    world.batch("0.0")
    world.publish("0.1")
    assert not world.flip("r0", "0.1")
    world.tick(26)
    assert world.flip("r0", "0.1")
    assert world.status().cancelled == {"drain_timeout": 2}
    world.ready("r0", "0.1")
    again = world.lease(2)
    assert {lease.rollout_id for lease in again} == {lease.rollout_id for lease in leases[4:]}
    assert all(lease.attempt_id.endswith("-a1") for lease in again)


def test_a_registered_again_replica_loses_its_attempts() -> None:
    world = harness()
    world.lease(2)
    world.register("r0")
    assert world.status().failures == {"infra:replica_lost": 2}
    assert world.lease(2) == []
    world.ready("r0", "0.0")
    assert len(world.lease(2)) == 2


def test_a_refused_version_leaves_the_old_one_serving() -> None:
    world = harness(staleness={"max_policy_lag": 2}, trainer={"steps": 9})
    world.finish_attempts(world.lease(4))
    world.batch("0.0")
    world.publish("0.1")
    world.call(c.REFUSED, m.ReplicaRefused(replica_id="r0", version="0.1", reason="digest"))
    assert {lease.policy_version for lease in world.lease(1)} == {"0.0"}
    assert world.status().versions[1]["refused"] == {"r0": "digest"}


def test_versions_tell_their_times_and_digests() -> None:
    world = harness("r0", "r1")
    version = world.status().versions[0]
    assert version["publish_s"] == 0.0 and version["digests"] == {"r0": "d", "r1": "d"}
    assert (version["transfer_s"], version["pause_s"]) == (1.0, 0.2)
