"""A run in which every group fails ends with the reasons; a disturbance does not end it."""

from __future__ import annotations

import pytest
from coordinator_world import Harness, harness

from hpcrl.coordinator.ledger import Refused
from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m
from hpcrl.protocol.status import StatusRequest

SECTIONS: dict[str, dict] = {
    "coordinator": {"infra_retries": 0, "failed_groups": 3, "failed_after_s": 60.0},
    "trainer": {"steps": 9, "groups_per_step": 1},
}


def fail_groups(world: Harness, n: int, seconds: float) -> None:
    for _ in range(n):
        items = [
            m.FailureItem(
                attempt_id=lease.attempt_id, kind="infra", reason="sandbox_start", message="no\nuser namespaces"
            )
            for lease in world.lease(2)
        ]
        world.call(c.FAILED, m.FailureReport(reporter_id="w", items=items))
        world.tick(seconds)


def test_a_run_that_only_fails_is_given_up_with_the_reasons_also_after_a_restart() -> None:
    world = harness(**SECTIONS)
    fail_groups(world, 2, 30.0)
    world.restart()
    world.call(c.STATUS, StatusRequest())
    assert world.batch("0.0").groups is None
    fail_groups(world, 1, 0.0)
    for _ in range(2):
        with pytest.raises(Refused) as told:
            world.batch("0.0")
        assert "no batch for 0.0: 3 groups in a row failed within 60 s" in str(told.value)
        assert "6 × infra:sandbox_start; the last, g000002-r1-a0 on w: no user namespaces" in str(told.value)
        assert world.lease(2) == []
        world.restart()
    assert world.status().recent_reward is None


def test_a_disturbance_shorter_than_the_limit_ends_nothing_however_many_groups_it_costs() -> None:
    world = harness(**SECTIONS)
    fail_groups(world, 20, 1.0)
    world.finish_attempts(world.lease(2))
    assert world.batch("0.0").groups is not None
    assert world.status().groups == {"closed:group_failed": 20, "consumed": 1, "zero_variance": 1}


def test_a_completed_group_ends_the_row() -> None:
    world = harness(**SECTIONS, staleness={"max_policy_lag": 3})
    fail_groups(world, 2, 60.0)
    world.finish_attempts(world.lease(2))
    fail_groups(world, 2, 60.0)
    assert world.batch("0.0").groups is not None
    assert world.lease(2)


def test_an_evaluation_under_way_is_told_too() -> None:
    world = harness(**SECTIONS)
    leases = world.lease(2)
    world.call(c.EVAL, m.EvalRequest(version="0.0", samples=1))
    held = world.lease(1)
    assert held[0].split == "eval"
    world.fail(*[lease.attempt_id for lease in leases])
    world.tick(61)
    world.lease(1)
    fail_groups(world, 2, 0.0)
    with pytest.raises(Refused, match="no evaluation: 3 groups in a row failed"):
        world.call(c.EVAL_STATUS, m.EvalStatusRequest(version="0.0"))


def test_a_resumed_run_tries_again() -> None:
    world = harness(**SECTIONS)
    fail_groups(world, 3, 60.0)
    assert world.lease(2) == []
    world.call(c.FINISH, m.Finish(reason="given up"))
    world.restart()
    world.queue.reopen()
    world.save()
    world.restart()
    world.start(0)
    world.register("r0")
    world.publish("1.0", "r0")
    assert len(world.lease(2)) == 2
