"""Evaluations beside training: what they are bound to, and what they must leave alone."""

from __future__ import annotations

import pytest
from coordinator_world import Harness, beat, harness

from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m


def evaluate(world: Harness, version: str) -> m.EvalResult:
    return world.call(c.EVAL_STATUS, m.EvalStatusRequest(version=version))


def test_an_evaluation_goes_first_is_bound_to_its_version_and_stays_out_of_batches() -> None:
    world = harness(staleness={"max_policy_lag": 2}, coordinator={"infra_retries": 0})
    assert world.lease(1)[0].rollout_id == "g000000-r0"
    world.call(c.EVAL, m.EvalRequest(version="0.0", samples=2))
    world.call(c.EVAL, m.EvalRequest(version="0.0", samples=2))
    leases = world.lease(5)
    assert [lease.group_id for lease in leases] == ["e0.0-0", "e0.0-0", "e0.0-1", "e0.0-1", "g000000"]
    assert [lease.split for lease in leases] == ["eval"] * 4 + ["train"]
    world.artifact(*[lease.attempt_id for lease in leases[:2]])
    world.score(reward=1.0)
    world.seal(*leases[:2])
    result = evaluate(world, "0.0")
    assert (result.done, result.total, result.success) == (2, 4, None)
    world.artifact(leases[2].attempt_id)
    world.score(reward=0.0)
    world.seal(leases[2])
    world.fail(leases[3].attempt_id)
    result = evaluate(world, "0.0")
    assert (result.done, result.failed) == (4, 1)
    assert result.success == pytest.approx(2 / 3)
    assert world.status().consumed == 0
    assert beat(world, leases[0].attempt_id) == {}
    world.restart()
    assert evaluate(world, "0.0") == result


def test_a_replica_does_not_leave_a_version_under_evaluation() -> None:
    world = harness(staleness={"max_policy_lag": 2})
    world.finish_attempts(world.lease(4))
    world.batch("0.0")
    world.call(c.EVAL, m.EvalRequest(version="0.0", samples=1))
    world.publish("0.1")
    assert not world.flip("r0", "0.1")
    world.finish_attempts(world.lease(2))
    assert world.flip("r0", "0.1")


def test_a_held_out_task_that_ends_leaves_the_training_group_of_the_same_number_complete() -> None:
    world = harness()
    world.call(c.EVAL, m.EvalRequest(version="0.0", samples=1))
    evaluation, training = world.lease(2), world.lease(4)
    assert [lease.group_id for lease in evaluation] == ["e0.0-0", "e0.0-1"]
    assert {lease.group_id for lease in training} == {"g000000", "g000001"}
    world.finish_attempts(training)
    world.finish_attempts(evaluation)
    groups = world.batch("0.0").groups
    assert groups is not None and [group.group_id for group in groups] == ["g000000", "g000001"]
