"""Failures, silent workers, late reports, scores: what is tried again and what is rejected."""

from __future__ import annotations

from coordinator_world import beat, harness

from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m
from hpcrl.protocol.states import State


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


def test_a_worker_that_leaves_gives_its_attempts_back_and_spends_no_retry() -> None:
    world = harness(coordinator={"infra_retries": 0})
    first = {lease.rollout_id for lease in world.lease(4)}
    for number in range(3):
        world.fail(*[f"{rollout}-a{number}" for rollout in sorted(first)], reason=m.WORKER_LEFT)
        again = world.lease(4)
        assert {lease.attempt_id for lease in again} == {f"{rollout}-a{number + 1}" for rollout in first}
    assert world.status().cancelled == {"worker_left": 12}
    assert world.status().failures == {}
    late = "g000000-r0-a0"
    assert late in world.fail(late, reason=m.WORKER_LEFT).rejected


def test_what_a_worker_held_that_is_started_again_fails_at_once() -> None:
    world = harness(coordinator={"infra_retries": 1})
    scored, ready, leased = (lease.attempt_id for lease in world.lease(3))
    world.artifact(scored, ready)
    world.score(n=1)
    [other] = world.lease(1, "other")
    world.call(c.WORKER_START, m.ProcessStart(name="w"))
    status = world.status()
    assert status.failures == {"infra:worker_died": 3}
    assert status.attempts == {State.LEASED: 1, State.INFRA_FAILED: 3}
    again = {lease.attempt_id for lease in world.lease(3, "other")}
    assert again == {name.replace("-a0", "-a1") for name in (scored, ready, leased)}
    assert world.artifact(other.attempt_id, worker="other").accepted
    assert world.artifact(leased).rejected == {leased: "worker_died"}


def test_what_a_worker_had_sealed_survives_it() -> None:
    world = harness()
    leases = world.lease(2)
    world.finish_attempts(leases)
    world.call(c.WORKER_START, m.ProcessStart(name="w"))
    assert world.status().failures == {}
    assert world.status().attempts == {State.ACCEPTED: 2}


def test_what_a_scorer_held_that_is_started_again_is_offered_at_once() -> None:
    world = harness(coordinator={"infra_retries": 1}, scoring={"lease_s": 130})
    first, second = world.lease(2)
    world.artifact(first.attempt_id, second.attempt_id)
    one, two = m.ScoringRequest(scorer_id="s1", n=1), m.ScoringRequest(scorer_id="s2", n=5)
    [held] = world.call(c.LEASE_SCORING, one).leases
    [others] = world.call(c.LEASE_SCORING, two).leases
    world.call(c.SCORER_START, m.ProcessStart(name="s1"))
    world.restart()
    assert [lease.attempt_id for lease in world.call(c.LEASE_SCORING, two).leases] == [held.attempt_id]
    assert world.scored(held.attempt_id, scorer="s1").rejected == {held.attempt_id: "scoring_lease_expired"}
    world.call(c.SCORER_START, m.ProcessStart(name="s2"))
    assert world.status().failures == {"infra:scorer_died": 1}
    assert [lease.attempt_id for lease in world.call(c.LEASE_SCORING, one).leases] == [others.attempt_id]


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


def test_a_replica_hears_which_of_its_attempts_are_not_wanted_any_more() -> None:
    world = harness()
    first, second = (lease.attempt_id for lease in world.lease(2))
    asked = m.EndedRequest(replica_id="r0", attempt_ids=[first, second, "of-another-run"])
    assert world.call(c.ENDED, asked).ended == {"of-another-run": "unknown_attempt"}
    world.fail(first, reason="node_lost")
    world.artifact(second)
    ended = {first: "node_lost", "of-another-run": "unknown_attempt"}
    assert world.call(c.ENDED, asked).ended == ended
    world.restart()
    assert world.call(c.ENDED, asked).ended == ended


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
