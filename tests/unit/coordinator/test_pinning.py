"""What weights.pin and weights.slots change in the queue: when a replica may flip, which attempts go on, how lag is counted."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_world import Harness, make_config, seal_item

from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m
from hpcrl.protocol.keys import read_attempt_key


def running(eval_tasks: int = 0, lora: bool = False, lag: int = 2, **weights: Any) -> tuple[Harness, list[m.Lease]]:
    """A replica serves 0.0, 0.1 is published; and two attempts bound to 0.0 that are under way."""
    config = make_config(
        **({"lora": {"rank": 8}} if lora else {}),
        staleness={"max_policy_lag": lag},
        trainer={"steps": 9},
        rollout={"attempt_timeout_s": 25.0},
        weights={"drain_timeout_s": 25.0, **weights},
    )
    world = Harness(config, eval_tasks=eval_tasks)
    world.register("r0")
    world.start()
    world.publish("0.0", "r0")
    leases = world.lease(6)
    world.finish_attempts(leases[:4])
    world.batch("0.0")
    world.publish("0.1")
    return world, leases[4:]


def refuse(world: Harness) -> None:
    world.call(c.REFUSED, m.ReplicaRefused(replica_id="r0", version="0.1", reason="held_weights: x differs"))


def seal(world: Harness, lease: m.Lease, oldest: str, newest: str) -> m.Ack:
    world.artifact(lease.attempt_id)
    world.score()
    item = seal_item(lease.attempt_id, oldest, world.now).model_copy(update={"newest_version": newest})
    return world.call(c.SEALED, m.SealedReport(worker_id="w", items=[item]))


@pytest.mark.parametrize("pin", ["turn", "token"])
def test_a_replica_flips_under_its_attempts_and_they_go_on(pin: str) -> None:
    world, old = running(pin=pin)
    assert world.flip("r0", "0.1")
    world.ready("r0", "0.1")
    first, second = old
    assert seal(world, first, "0.0", "0.1").accepted == [first.attempt_id]
    assert seal(world, second, "0.1", "0.1").accepted == [second.attempt_id]
    assert world.status().failures == {}


def test_lag_is_that_of_the_oldest_trained_token() -> None:
    world, old = running(pin="token")
    world.flip("r0", "0.1")
    world.ready("r0", "0.1")
    first, second = old
    seal(world, first, "0.0", "0.1")
    seal(world, second, "0.1", "0.1")
    world.finish_attempts(world.lease(2))
    batch = world.batch("0.1")
    assert batch.groups is not None
    refs = {ref.attempt_id: ref.oldest_version for group in batch.groups for ref in group.trajectories}
    assert (refs[first.attempt_id], refs[second.attempt_id]) == ("0.0", "0.1")
    assert world.status().lag_histogram == {0: 4 + 3, 1: 1}


@pytest.mark.parametrize(
    ("oldest", "newest", "reason"),
    [("0.1", "0.0", "version_mismatch"), ("0.0", "1.0", "version_mismatch"), ("0.0", "0.2", "version_unknown")],
)
def test_spans_out_of_range_are_a_data_failure(oldest: str, newest: str, reason: str) -> None:
    world, old = running(pin="turn")
    world.flip("r0", "0.1")
    world.ready("r0", "0.1")
    lease = old[0]
    assert seal(world, lease, oldest, newest).rejected == {lease.attempt_id: reason}


def test_after_a_failed_flip_attempts_go_on_with_the_old_version() -> None:
    world, old = running(pin="token")
    world.flip("r0", "0.1")
    world.ready("r0", "0.0")
    refuse(world)
    lease = old[0]
    assert seal(world, lease, "0.0", "0.0").accepted == [lease.attempt_id]
    assert world.status().replicas == {"r0": "up 0.0; refused 0.1: held_weights: x differs"}


def test_a_broken_flip_takes_the_replica_out_until_the_old_version_was_verified() -> None:
    world, _ = running(pin="token")
    world.flip("r0", "0.1")
    refuse(world)
    assert world.status().replicas == {"r0": "up nothing; refused 0.1: held_weights: x differs"}
    assert world.lease(1) == []
    world.ready("r0", "0.0")
    assert [lease.policy_version for lease in world.lease(1)] == ["0.0"]
    world.publish("0.1", "r0")
    assert world.status().replicas == {"r0": "up 0.1"}


def test_evaluations_stay_with_their_version_in_every_mode() -> None:
    world, _ = running(eval_tasks=1, pin="token")
    world.flip("r0", "0.1")
    world.ready("r0", "0.1")
    world.call(c.EVAL, m.EvalRequest(version="0.1", samples=1))
    lease = world.lease(1)[0]
    key = read_attempt_key("secret", lease.api_key)
    assert lease.split == "eval"
    assert key is not None
    assert (key.pin, key.policy_version) == ("trajectory", "0.1")
    others = world.lease(4)
    train = read_attempt_key("secret", others[0].api_key)
    assert train is not None
    assert train.pin == "token"
    world.finish_attempts(others)
    assert world.batch("0.1").groups is not None
    world.call(c.PUBLISHED, m.VersionPublished(version="0.2", digest="d", nbytes=1))
    assert not world.flip("r0", "0.2")
    world.finish_attempts([lease])
    assert world.flip("r0", "0.2")


def test_with_two_slots_nothing_drains() -> None:
    world, old = running(slots=2)
    assert world.flip("r0", "0.1")
    assert world.status().replicas == {"r0": "up 0.0"}
    between = world.lease(1)
    assert [lease.policy_version for lease in between] == ["0.0"]
    world.ready("r0", "0.1")
    assert [lease.policy_version for lease in world.lease(1)] == ["0.1"]
    assert seal(world, old[0], "0.0", "0.0").accepted == [old[0].attempt_id]
    assert seal(world, old[1], "0.0", "0.1").rejected == {old[1].attempt_id: "version_mismatch"}


def test_the_second_slot_is_free_when_the_older_version_has_no_attempt() -> None:
    world, old = running(slots=2)
    world.flip("r0", "0.1")
    world.ready("r0", "0.1")
    new = world.lease(5)
    assert {lease.policy_version for lease in new} == {"0.1"}
    world.finish_attempts(new[:4])
    assert world.batch("0.1").groups is not None
    world.finish_attempts([old[0]])
    world.call(c.PUBLISHED, m.VersionPublished(version="0.2", digest="d", nbytes=1))
    assert not world.flip("r0", "0.2")  # an attempt of 0.0 still has the second engine
    world.artifact(old[1].attempt_id)
    assert world.flip("r0", "0.2")


def test_an_attempt_that_keeps_the_second_slot_too_long_is_cancelled() -> None:
    world, old = running(slots=2)
    world.flip("r0", "0.1")
    world.ready("r0", "0.1")
    world.finish_attempts(world.lease(4))
    assert world.batch("0.1").groups is not None
    world.finish_attempts(old[:1])
    world.call(c.PUBLISHED, m.VersionPublished(version="0.2", digest="d", nbytes=1))
    assert not world.flip("r0", "0.2")
    world.tick(26)
    assert world.flip("r0", "0.2")
    assert world.status().cancelled == {"drain_timeout": 1}


def grant(world: Harness, version: str) -> m.FlipGrant:
    return world.call(c.FLIP, m.FlipRequest(replica_id="r0", version=version))


def test_adapters_are_kept_while_attempts_are_bound_to_them() -> None:
    world, old = running(lora=True, lag=4, slots=3)
    assert grant(world, "0.1") == m.FlipGrant(granted=True, keep=["0.0"])
    world.ready("r0", "0.1")
    between = world.lease(5)
    world.finish_attempts(between[:4])
    assert world.batch("0.1").groups is not None
    world.call(c.PUBLISHED, m.VersionPublished(version="0.2", digest="d", nbytes=1))
    assert grant(world, "0.2") == m.FlipGrant(granted=True, keep=["0.1", "0.0"])
    world.ready("r0", "0.2")
    newest = world.lease(5)
    assert {lease.policy_version for lease in newest} == {"0.2"}
    world.finish_attempts([*newest[1:], old[0]])
    assert world.batch("0.2").groups is not None
    world.call(c.PUBLISHED, m.VersionPublished(version="0.3", digest="d", nbytes=1))
    assert grant(world, "0.3") == m.FlipGrant(granted=False, keep=["0.2", "0.1", "0.0"])  # one attempt each
    world.artifact(between[4].attempt_id)
    assert grant(world, "0.3") == m.FlipGrant(granted=True, keep=["0.2", "0.0"])  # not the oldest is free, but one is
    assert seal(world, old[1], "0.0", "0.0").accepted == [old[1].attempt_id]


def test_adapters_by_turn_are_kept_for_evaluations_only() -> None:
    world, old = running(lora=True, slots=2, pin="turn")
    assert grant(world, "0.1") == m.FlipGrant(granted=True, keep=["0.0"])
    world.ready("r0", "0.1")
    assert seal(world, old[0], "0.0", "0.1").accepted == [old[0].attempt_id]
    world.finish_attempts(world.lease(4))
    assert world.batch("0.1").groups is not None
    world.call(c.PUBLISHED, m.VersionPublished(version="0.2", digest="d", nbytes=1))
    assert grant(world, "0.2") == m.FlipGrant(granted=True, keep=["0.1"])
