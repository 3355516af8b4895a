"""The queue's rules one by one."""

from __future__ import annotations

import pytest
from coordinator_world import Harness, make_config, seal_item

from hpcrl.coordinator.ledger import Refused
from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m
from hpcrl.protocol.keys import read_attempt_key
from hpcrl.protocol.states import State


def harness(*replicas: str, **sections: dict) -> Harness:
    """A started run whose replicas all serve 0.0."""
    world = Harness(make_config(**sections))
    world.register(*replicas or ("r0",))
    world.start()
    world.publish("0.0", *replicas or ("r0",))
    return world


def beat(world: Harness, *attempts: str, worker: str = "w", running: bool = False) -> dict[str, str]:
    request = m.Heartbeat(worker_id=worker, attempt_ids=list(attempts), running=list(attempts) if running else [])
    return world.call(c.HEARTBEAT, request).cancelled


# ---------------------------------------------------------------- leases and admission


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


# ---------------------------------------------------------------- failures


def test_an_infrastructure_failure_is_retried_under_a_new_attempt_until_the_budget_is_spent() -> None:
    world = harness(coordinator={"infra_retries": 1})
    lease, other = world.lease(2)
    world.fail(lease.attempt_id)
    again = world.lease(1)[0]
    assert (again.rollout_id, again.attempt_id) == (lease.rollout_id, "g000000-r0-a1")
    world.fail(again.attempt_id)
    status = world.status()
    assert status.failures == {"infra:node_lost": 2}
    assert status.rollouts[State.INFRA_FAILED] == 1
    world.fail(other.attempt_id)
    assert world.lease(1)[0].attempt_id == "g000000-r1-a1"


def test_each_kind_of_failure_has_its_own_budget_also_after_a_restart() -> None:
    world = harness(coordinator={"infra_retries": 1, "data_retries": 1})
    attempt = world.lease(4)[0].attempt_id
    for kind in ("infra", "data"):
        world.fail(attempt, kind=kind)
        [again] = world.lease(1)
        attempt = again.attempt_id
    world.restart()
    assert State.INFRA_FAILED not in world.status().rollouts
    world.fail(attempt, kind="data")
    assert world.status().rollouts[State.INFRA_FAILED] == 1


def test_a_group_without_two_scores_is_closed_and_replaced() -> None:
    world = harness(coordinator={"infra_retries": 0})
    leases = world.lease(100)
    bad, rest = [x for x in leases if x.rollout_id == "g000001-r1"], leases[:3]
    world.finish_attempts(rest)
    world.fail(*[lease.attempt_id for lease in bad])
    assert world.status().cancelled == {"group_failed": 1}
    assert {lease.group_id for lease in world.lease(100)} == {"g000002"}


def test_a_policy_failure_is_not_an_infrastructure_failure() -> None:
    world = harness()
    lease = world.lease(1)[0]
    assert "scored" in world.fail(lease.attempt_id, kind="policy", reason="oom").rejected[lease.attempt_id]
    assert world.status().attempts == {State.LEASED: 1}


def test_a_silent_worker_loses_its_attempt_and_its_late_report_is_rejected_and_counted() -> None:
    world = harness()
    lease = world.lease(1)[0]
    world.tick(20)
    assert beat(world, lease.attempt_id) == {}
    world.tick(20)
    assert world.status().attempts == {State.LEASED: 1}
    world.tick(11)
    assert world.status().failures == {"infra:lease_expired": 1}
    assert world.artifact(lease.attempt_id).rejected == {lease.attempt_id: "lease_expired"}
    assert beat(world, lease.attempt_id) == {lease.attempt_id: "lease_expired"}
    assert world.status().rejected_reports == {"lease_expired": 1}
    stored = world.db.execute("SELECT attempt_id, report, reporter, reason FROM rejections").fetchall()
    assert stored == [(lease.attempt_id, "artifact", "w", "lease_expired")]


def test_an_attempt_past_its_wall_clock_limit_is_given_up_although_its_worker_lives() -> None:
    world = harness()
    lease = world.lease(1)[0]
    for _ in range(14):
        world.tick(10)
        beat(world, lease.attempt_id, running=True)
    assert world.status().failures == {"infra:attempt_timeout": 1}


def test_reports_of_others_and_of_unknown_attempts_are_rejected() -> None:
    world = harness()
    lease = world.lease(1)[0]
    assert world.artifact(lease.attempt_id, worker="other").rejected == {lease.attempt_id: "not_yours"}
    assert world.artifact("g9-r0-a0").rejected == {"g9-r0-a0": "unknown_attempt"}
    assert beat(world, lease.attempt_id, worker="other") == {lease.attempt_id: "not_yours"}


def test_a_report_out_of_order_is_rejected() -> None:
    world = harness()
    lease = world.lease(1)[0]
    assert world.seal(lease).rejected == {lease.attempt_id: "attempt_is_leased"}
    world.artifact(lease.attempt_id)
    assert world.artifact(lease.attempt_id).rejected == {lease.attempt_id: "attempt_is_artifact_ready"}


def test_a_trajectory_of_another_version_is_a_data_failure() -> None:
    world = harness()
    lease = world.lease(1)[0]
    world.artifact(lease.attempt_id)
    world.score()
    ack = world.seal(lease.model_copy(update={"policy_version": "0.1"}))
    assert ack.rejected == {lease.attempt_id: "version_mismatch"}
    assert world.status().failures == {"data:version_mismatch": 1}


# ---------------------------------------------------------------- scoring


def test_a_scoring_lease_expires_and_another_scorer_takes_over() -> None:
    world = harness(scoring={"lease_s": 130})
    lease = world.lease(1)[0]
    world.artifact(lease.attempt_id)
    request = m.ScoringRequest(scorer_id="s1", n=5)
    assert [x.attempt_id for x in world.call(c.LEASE_SCORING, request).leases] == [lease.attempt_id]
    for _ in range(13):
        assert world.call(c.LEASE_SCORING, request).leases == []
        world.tick(10)
        beat(world, lease.attempt_id)
    assert world.call(c.LEASE_SCORING, m.ScoringRequest(scorer_id="s2", n=5)).leases
    assert world.scored(lease.attempt_id, scorer="s1").rejected == {lease.attempt_id: "scoring_lease_expired"}
    assert world.scored(lease.attempt_id, scorer="s2").accepted == [lease.attempt_id]


def test_scoring_may_take_its_configured_lease_also_after_a_restart() -> None:
    world = harness(scoring={"lease_s": 700})
    lease = world.lease(1)[0]
    world.artifact(lease.attempt_id)
    request = m.ScoringRequest(scorer_id="s1", n=5)
    assert world.call(c.LEASE_SCORING, request).leases[0].deadline_at == world.now + 700
    world.restart()
    for _ in range(69):
        world.tick(10)
        beat(world, lease.attempt_id)
    assert world.call(c.LEASE_SCORING, request).leases == []
    assert world.scored(lease.attempt_id, scorer="s1").accepted == [lease.attempt_id]


def test_a_score_that_is_no_number_is_a_data_failure() -> None:
    world = harness()
    lease = world.lease(1)[0]
    world.artifact(lease.attempt_id)
    assert world.score(reward=float("nan")) == []
    assert world.status().failures == {"data:reward_not_finite": 1}


def test_the_scoring_backlog_and_the_scores_of_a_worker() -> None:
    world = harness()
    leases = world.lease(2)
    ids = [lease.attempt_id for lease in leases]
    world.artifact(*ids)
    assert world.status().scoring_backlog == 2
    world.score(reward=0.25)
    reply = world.call(c.SCORES, m.ScoresRequest(worker_id="w", attempt_ids=[*ids, "gone"]))
    assert [(score.attempt_id, score.reward) for score in reply.scores] == [(i, 0.25) for i in ids]
    assert reply.cancelled == {"gone": "unknown_attempt"}


# ---------------------------------------------------------------- batches and staleness


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


# ---------------------------------------------------------------- damaged shards


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


# ---------------------------------------------------------------- flips


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


# ---------------------------------------------------------------- evaluation


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


# ---------------------------------------------------------------- the end


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
