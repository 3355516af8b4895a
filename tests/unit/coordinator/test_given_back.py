"""Batches that the trainer gives back: damaged shards, and trajectories too far from the present weights."""

from __future__ import annotations

import pytest
from coordinator_world import Harness, harness, seal_item

from hpcrl.coordinator.ledger import Refused
from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m


def test_a_bad_shard_takes_the_batch_back_and_only_its_samples_are_drawn_again() -> None:
    world = harness(trainer={"steps": 5})
    world.finish_attempts(world.lease(4))
    first = world.batch("0.0").groups
    assert first is not None
    bad, kept = first[0].trajectories[0], first[0].trajectories[1]
    report = m.BadShard(version="0.0", shard=bad.shard, reason="truncated")
    world.call(c.BAD_SHARD, report)
    status = world.status()
    assert status.failures == {"data:bad_shard": 1}
    assert (status.step, status.consumed, status.accepted_unused) == (0, 0, 3)
    assert world.batch("0.0").groups is None
    world.restart()
    [again] = world.lease(4)
    assert again.attempt_id == "g000000-r0-a1"
    world.finish_attempts([again])
    groups = world.batch("0.0").groups
    assert groups is not None
    assert groups[1] == first[1]
    assert groups[0].trajectories[1] == kept
    assert groups[0].trajectories[0].attempt_id == "g000000-r0-a1"
    assert world.status().duplicates == 0
    with pytest.raises(Refused, match=r"no batch for 0\.2"):
        world.call(c.BAD_SHARD, m.BadShard(version="0.2", shard="x", reason="gone"))


def test_a_shard_that_stays_bad_spends_the_data_budget() -> None:
    world = harness(coordinator={"data_retries": 0})
    world.finish_attempts(world.lease(4))
    groups = world.batch("0.0").groups
    assert groups is not None
    world.call(c.BAD_SHARD, m.BadShard(version="0.0", shard=groups[0].trajectories[0].shard, reason="gone"))
    assert world.status().groups == {"closed:group_failed": 1}
    assert {lease.group_id for lease in world.lease(4)} == {"g000002"}


def test_a_bad_shard_may_hold_a_whole_group() -> None:
    world = harness(coordinator={"data_retries": 0})
    leases = world.lease(4)
    world.artifact(*[lease.attempt_id for lease in leases])
    world.score()
    items = [seal_item(lease.attempt_id, "0.0", world.now).model_copy(update={"shard": "s.h5"}) for lease in leases]
    world.call(c.SEALED, m.SealedReport(worker_id="w", items=items))
    assert world.batch("0.0").groups is not None
    world.call(c.BAD_SHARD, m.BadShard(version="0.0", shard="s.h5", reason="gone"))
    assert world.status().groups == {"closed:group_failed": 2}


# ---------------------------------------------------------------- too far from the present weights


def stale_batch(redraws: int = 3) -> tuple[Harness, list[m.BatchGroup]]:
    """The batch for 0.1 holds samples of 0.0, and a replica that still serves 0.0 has room for more."""
    world = harness(staleness={"max_policy_lag": 2}, trainer={"steps": 9}, coordinator={"redraws": redraws})
    world.finish_attempts(world.lease(8))
    assert world.batch("0.0").groups is not None
    world.call(c.PUBLISHED, m.VersionPublished(version="0.1", digest="d", nbytes=1))
    groups = world.batch("0.1").groups
    assert groups is not None
    return world, groups


def too_far(world: Harness, *references: m.TrajectoryRef, version: str = "0.1") -> None:
    deviations = {reference.attempt_id: 0.7 for reference in references}
    world.call(c.OFF_POLICY, m.OffPolicy(version=version, deviations=deviations))


def test_what_deviates_too_far_is_drawn_again_with_the_present_weights_and_the_rest_is_trained() -> None:
    world, groups = stale_batch()
    far, kept = groups[0].trajectories
    too_far(world, far)
    status = world.status()
    assert (status.step, status.consumed, status.accepted_unused) == (1, 4, 3)
    assert (status.cancelled, status.groups["redrawn:ratio"]) == ({"ratio": 1}, 1)
    assert world.batch("0.1").groups is None
    world.restart()
    assert world.lease(9) == []  # the replica serves 0.0, from which the weights have moved too far
    assert world.flip("r0", "0.1")
    world.ready("r0", "0.1")
    [again, *others] = world.lease(9)
    assert (again.attempt_id, again.policy_version) == (far.attempt_id.replace("-a0", "-a1"), "0.1")
    world.finish_attempts([again])
    batch = world.batch("0.1").groups
    assert batch is not None
    assert batch[1] == groups[1]
    assert [reference.attempt_id for reference in batch[0].trajectories] == [again.attempt_id, kept.attempt_id]
    assert world.status().duplicates == 0
    assert {lease.policy_version for lease in others} == {"0.1"}


def test_a_group_that_deviated_too_often_is_closed_and_another_takes_its_place() -> None:
    world, groups = stale_batch(redraws=0)
    too_far(world, *groups[0].trajectories)
    status = world.status()
    assert (status.cancelled, status.groups["closed:ratio"]) == ({"ratio": 2}, 1)
    world.publish("0.1", "r0")
    assert "g000004" in {lease.group_id for lease in world.lease(100)}


def test_only_the_batch_under_way_can_be_given_back() -> None:
    world, groups = stale_batch()
    with pytest.raises(Refused, match=r"no batch for 0\.0 is being trained"):
        too_far(world, groups[0].trajectories[0], version="0.0")
    with pytest.raises(Refused, match="lineage"):
        too_far(world, groups[0].trajectories[0], version="1.1")
    before = world.status()
    assert world.batch("0.1").groups == groups
    assert world.status() == before


def test_after_a_resume_older_versions_may_be_sampled_from_again() -> None:
    world, groups = stale_batch()
    too_far(world, groups[0].trajectories[0])
    world.start(checkpoint=None)
    world.restart()
    world.register("r0")
    world.publish("1.0", "r0")
    assert world.batch("1.0").groups is not None
    assert "g000002-r0-a1" in {lease.attempt_id for lease in world.lease(9)}


def test_a_given_back_head_takes_its_stragglers_along() -> None:
    world = harness(
        staleness={"max_policy_lag": 2},
        trainer={"steps": 3, "groups_per_step": 1},
        rollout={"group_size": 3, "min_group": 2, "straggler_grace_s": 1.0},
    )
    leases = world.lease(3)
    world.finish_attempts(leases[:2])
    world.tick(2)
    world.finish_attempts(leases[2:])
    groups = world.batch("0.0").groups
    assert groups is not None and len(groups[0].trajectories) == 3
    too_far(world, groups[0].trajectories[0], version="0.0")
    assert world.batch("0.0").groups is None
    [again] = [lease for lease in world.lease(9) if lease.group_id == "g000000"]
    world.finish_attempts([again])
    batch = world.batch("0.0").groups
    assert batch is not None
    assert sorted(r.rollout_id for r in batch[0].trajectories) == [f"g000000-r{index}" for index in range(3)]


def test_groups_that_moved_up_while_they_were_in_a_batch_can_be_drawn_again_at_once() -> None:
    """Complete ahead of their time through a resume, they were given out while those before them were closed as stale."""
    world = harness(trainer={"steps": 2, "groups_per_step": 2}, coordinator={"redraws": 1})
    world.finish_attempts(world.lease(4))
    assert world.batch("0.0").groups is not None
    world.publish("0.1", "r0")
    world.finish_attempts(world.lease(4))
    world.start(checkpoint=None)
    world.register("r0")
    world.publish("1.0", "r0")
    first = world.batch("1.0").groups
    assert first is not None
    too_far(world, *(group.trajectories[0] for group in first), version="1.0")
    second = world.batch("1.0").groups
    assert second is not None and [group.group_id for group in second] == ["g000002", "g000003"]
    too_far(world, second[0].trajectories[0], second[1].trajectories[0], version="1.0")
    assert world.status().groups["closed:stale"] == 2
    assert {lease.rollout_id for lease in world.lease(9)} == {"g000002-r0", "g000003-r0"}
