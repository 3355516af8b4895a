"""What is in a batch, what is too stale for it, what a resume takes back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from coordinator_world import Harness, harness

from hpcrl.coordinator.entities import Attempt, Group, Rollout
from hpcrl.coordinator.ledger import Refused


def test_a_batch_is_given_once_and_the_same_again() -> None:
    world = harness()
    leases = world.lease(100)
    world.finish_attempts(leases[:3])
    waiting = world.batch("0.0")
    assert (waiting.groups, waiting.in_flight, waiting.waiting_groups) == (None, 1, 1)
    world.finish_attempts(leases[3:])
    batch = world.batch("0.0")
    assert batch.groups is not None
    assert [group.group_id for group in batch.groups] == ["g000000", "g000001"]
    assert world.batch("0.0") == batch
    world.restart()
    assert world.batch("0.0") == batch
    status = world.status()
    assert (status.consumed, status.step, status.accepted_unused, status.lag_histogram) == (4, 1, 0, {0: 4})
    with pytest.raises(Refused, match=r"next one is for 0\.1"):
        world.batch("0.2")


def two_stale_samples(redraws: int) -> Harness:
    """g000000 is overtaken; when 0.1 is consumed, its two samples of 0.0 are out of the bound."""
    world = harness(staleness={"max_policy_lag": 1}, trainer={"steps": 9}, coordinator={"redraws": redraws})
    first = world.lease(8)
    slow, fast = first[:2], first[2:]
    world.finish_attempts(fast[:4])
    world.batch("0.0")
    world.publish("0.1")
    world.finish_attempts([*slow[:1], *fast[4:]])
    world.artifact(slow[1].attempt_id)
    assert world.flip("r0", "0.1")
    world.ready("r0", "0.1")
    late = world.lease(2)
    assert {lease.policy_version for lease in late} == {"0.1"}
    world.finish_attempts(late)
    assert world.batch("0.1").groups is not None
    return world


def test_samples_that_can_no_longer_be_consumed_in_time_are_drawn_again_and_counted() -> None:
    world = two_stale_samples(redraws=1)
    status = world.status()
    assert status.cancelled == {"stale": 2}
    assert status.groups == {"consumed": 4, "zero_variance": 4, "redrawn:stale": 1}
    assert max(status.lag_histogram) == 1
    world.restart()
    again = world.lease(2)
    assert [lease.attempt_id for lease in again] == ["g000000-r0-a1", "g000000-r1-a1"]
    assert {lease.policy_version for lease in again} == {"0.1"}


def test_a_group_whose_redraws_are_spent_is_closed_and_replaced() -> None:
    world = two_stale_samples(redraws=0)
    status = world.status()
    assert status.cancelled == {"stale": 2}
    assert status.groups == {"consumed": 4, "zero_variance": 4, "closed:stale": 1}
    assert "g000000" not in {lease.group_id for lease in world.lease(100)}


def test_the_check_at_dequeue_stands_on_its_own() -> None:
    world = harness(staleness={"max_policy_lag": 1})
    world.finish_attempts(world.lease(4))
    world.queue.ledger.position = world.queue.ledger.position._replace(step=2)
    assert world.batch("0.2").groups is None
    assert world.status().cancelled == {"stale": 4}


def test_trajectories_past_the_age_bound_are_closed_and_counted() -> None:
    world = harness(staleness={"max_age_s": 60.0})
    world.finish_attempts(world.lease(4))
    world.tick(61)
    assert world.status().cancelled == {"too_old": 4}
    assert world.batch("0.0").groups is None
    world.finish_attempts(world.lease(4))
    assert world.batch("0.0").groups is not None


def test_a_resume_takes_later_consumptions_back() -> None:
    world = harness(trainer={"steps": 5})
    for step in range(3):
        world.finish_attempts(world.lease(4))
        assert world.batch(f"0.{step}").groups is not None
        world.publish(f"0.{step + 1}", "r0")
    third = world.batch("0.2")
    assert str(world.start(checkpoint=2)) == "1.2"
    status = world.status()
    assert (status.consumed, status.accepted_unused, status.step) == (8, 4, 2)
    again = world.batch("1.2")
    assert again.groups == third.groups
    assert world.status().duplicates == 0
    with pytest.raises(Refused, match="lineage"):
        world.ready("r0", "0.3")


def test_after_a_resume_groups_wait_for_a_version_that_is_fresh_enough_at_their_turn() -> None:
    world = harness(trainer={"steps": 5})
    world.finish_attempts(world.lease(4))
    assert world.batch("0.0").groups is not None
    world.publish("0.1", "r0")
    assert len(world.lease(4)) == 4
    world.start(checkpoint=0)
    world.register("r0")
    world.publish("1.0", "r0")
    assert world.lease(4) == []
    assert world.batch("1.0").groups is not None
    world.publish("1.1", "r0")
    assert {lease.attempt_id for lease in world.lease(4)} == {f"g00000{g}-r{r}-a1" for g in (2, 3) for r in (0, 1)}


def test_after_a_resume_groups_move_up_when_those_before_them_are_dropped() -> None:
    world = harness(trainer={"steps": 5}, staleness={"max_age_s": 60.0}, coordinator={"redraws": 0})
    world.finish_attempts(world.lease(4))
    assert world.batch("0.0").groups is not None
    world.publish("0.1", "r0")
    assert len(world.lease(4)) == 4
    world.start(checkpoint=0)
    world.register("r0")
    world.publish("1.0", "r0")
    world.tick(61)
    assert world.batch("1.0").groups is None
    assert {lease.group_id for lease in world.lease(4)} == {"g000002", "g000003"}


@contextmanager
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def live_objects() -> int:
    return sum(type(found) in (Group, Rollout, Attempt) for found in gc.get_objects())


def test_what_has_ended_leaves_memory_without_the_garbage_collector() -> None:
    world = harness(trainer={"steps": 9}, coordinator={"infra_retries": 0})
    with no_collections():
        before = live_objects()
        for step in range(3):
            world.finish_attempts(world.lease(100))
            assert world.batch(f"0.{step}").groups is not None
            world.publish(f"0.{step + 1}", "r0")
        for lease in world.lease(100):
            world.fail(lease.attempt_id)
        ledger = world.queue.ledger
        kept = sum(1 + len(group.rollouts) for group in ledger.groups.values()) + len(ledger.attempts)
        assert live_objects() - before <= kept
