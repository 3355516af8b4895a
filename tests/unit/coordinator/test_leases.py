"""Who is given what to sample, and when a new group may begin."""

from __future__ import annotations

import pytest
from coordinator_world import Harness, harness, make_config

from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m
from hpcrl.protocol.keys import read_attempt_key


def test_nothing_is_leased_before_a_trainer_and_a_version() -> None:
    world = Harness(make_config())
    world.register("r0")
    assert world.lease(5) == []
    world.start()
    assert world.lease(5) == []
    world.publish("0.0", "r0")
    assert len(world.lease(5)) == 4


def test_a_lease_says_who_where_and_until_when() -> None:
    world = harness()
    lease = world.lease(1)[0]
    assert (lease.attempt_id, lease.rollout_id, lease.group_id) == ("g000000-r0-a0", "g000000-r0", "g000000")
    assert (lease.policy_version, lease.replica_id, lease.base_url) == ("0.0", "r0", "http://r0/v1")
    assert lease.deadline_at == world.now + 100
    assert read_attempt_key("secret", lease.api_key) == ("g000000-r0-a0", "0.0", "r0", "trajectory")
    assert lease.sampling == m.Sampling(temperature=1.0, max_tokens=512)


def test_groups_are_leased_in_order_and_every_epoch_visits_every_task() -> None:
    world = harness(trainer={"groups_per_step": 10, "steps": 1}, rollout={"group_size": 1})
    leases = world.lease(10)
    assert [lease.group_id for lease in leases] == [f"g{i:06d}" for i in range(10)]
    tasks = [lease.task_id for lease in leases]
    assert sorted(tasks[:5]) == sorted(tasks[5:]) == [f"t{i}" for i in range(5)]
    assert tasks[:5] != tasks[5:]


@pytest.mark.parametrize(("lag", "groups"), [(0, 2), (1, 4), (2, 6), (9, 6)])
def test_admission_is_bounded_by_the_lag_and_by_the_steps_left(lag: int, groups: int) -> None:
    world = harness(staleness={"max_policy_lag": lag})
    assert len({lease.group_id for lease in world.lease(100)}) == groups


def test_lag_0_binds_nothing_new_until_the_next_version_is_ready() -> None:
    world = harness()
    world.finish_attempts(world.lease(100))
    assert world.batch("0.0").groups is not None
    assert world.lease(100) == []
    world.publish("0.1", "r0")
    assert {lease.policy_version for lease in world.lease(100)} == {"0.1"}


def test_the_least_loaded_replica_is_taken() -> None:
    world = harness("r0", "r1", staleness={"max_policy_lag": 2})
    assert [lease.replica_id for lease in world.lease(4)] == ["r0", "r1", "r0", "r1"]


def test_the_replica_with_the_least_kv_use_is_taken_and_what_it_is_given_counts_until_it_reports_again() -> None:
    world = harness("r0", "r1", staleness={"max_policy_lag": 9}, trainer={"steps": 30, "groups_per_step": 20})
    assert len(world.lease(4)) == 4
    world.call(c.LOAD, m.ReplicaLoad(replica_id="r0", kv_use=0.5))
    world.call(c.LOAD, m.ReplicaLoad(replica_id="r1", kv_use=0.1))
    # A mean attempt holds 0.15: r1 stands at 0.25, 0.4, 0.55 after one, two, three more.
    assert [lease.replica_id for lease in world.lease(4)] == ["r1", "r1", "r1", "r0"]
    world.call(c.LOAD, m.ReplicaLoad(replica_id="r1", kv_use=0.9))
    assert [lease.replica_id for lease in world.lease(1)] == ["r0"]


def test_quorum_holds_a_version_back_but_not_the_one_before_it() -> None:
    world = harness(
        "r0",
        "r1",
        staleness={"max_policy_lag": 3},
        weights={"quorum": 2},
        inference={"replicas": 2},
        trainer={"steps": 9},
    )
    world.finish_attempts(world.lease(4))
    world.batch("0.0")
    world.publish("0.1", "r0")
    old = world.lease(3)
    assert {(lease.replica_id, lease.policy_version) for lease in old} == {("r1", "0.0")}
    assert not world.flip("r1", "0.1")
    assert world.lease(1) == []
    world.finish_attempts(old)
    assert world.flip("r1", "0.1")
    world.ready("r1", "0.1")
    assert {lease.policy_version for lease in world.lease(3)} == {"0.1"}
