"""Evaluations beside training: what they must leave alone."""

from __future__ import annotations

from coordinator_world import Harness, make_config

from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m


def test_a_held_out_task_that_ends_leaves_the_training_group_of_the_same_number_complete() -> None:
    world = Harness(make_config())
    world.register("r0")
    world.start()
    world.publish("0.0", "r0")
    world.call(c.EVAL, m.EvalRequest(version="0.0", samples=1))
    evaluation, training = world.lease(2), world.lease(4)
    assert [lease.group_id for lease in evaluation] == ["e0.0-0", "e0.0-1"]
    assert {lease.group_id for lease in training} == {"g000000", "g000001"}
    world.finish_attempts(training)
    world.finish_attempts(evaluation)
    groups = world.batch("0.0").groups
    assert groups is not None and [group.group_id for group in groups] == ["g000000", "g000001"]
