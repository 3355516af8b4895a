"""The straggler rule: groups go ahead without their slowest rollouts, and still every rollout is trained exactly once."""

from __future__ import annotations

from collections import Counter

from coordinator_world import Harness, Odds, World, make_config
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.coordinator.check import check_database
from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m


def harness(steps: int = 5) -> tuple[Harness, list[m.Lease]]:
    """Batches of one group of three; two suffice after 10 s. Returns the leases of g000000, the last of which is slow."""
    world = Harness(
        make_config(
            rollout={"group_size": 3, "min_group": 2, "straggler_grace_s": 10.0, "attempt_timeout_s": 100.0},
            trainer={"steps": steps, "groups_per_step": 1},
            staleness={"max_policy_lag": 2},
        )
    )
    world.register("r0")
    world.start()
    world.publish("0.0", "r0")
    return world, world.lease(3)


def keep_alive(world: Harness, seconds: float) -> None:
    names = list(world.queue.ledger.attempts)
    world.call(c.HEARTBEAT, m.Heartbeat(worker_id="w", attempt_ids=names))
    world.tick(seconds)


def test_a_group_goes_ahead_after_the_grace_and_its_straggler_follows_with_the_groups_rewards() -> None:
    world, leases = harness()
    world.finish_attempts(leases[:2])
    keep_alive(world, 9)
    assert world.batch("0.0").groups is None
    keep_alive(world, 1)
    [group] = world.batch("0.0").groups or []
    assert [ref.rollout_id for ref in group.trajectories] == ["g000000-r0", "g000000-r1"]
    assert world.status().groups == {"split": 1, "stragglers": 1, "consumed": 1, "zero_variance": 1}
    world.restart()
    world.finish_attempts(world.lease(3))
    world.artifact(leases[2].attempt_id)
    world.score(reward=0.25)
    world.seal(leases[2])
    second, late = world.batch("0.1").groups or []
    assert (second.group_id, len(second.trajectories), second.baseline) == ("g000001", 3, [])
    assert (late.group_id, [ref.rollout_id for ref in late.trajectories]) == ("g000000", ["g000000-r2"])
    assert late.baseline == [1.0, 1.0]
    world.restart()
    assert world.batch("0.1").groups == [second, late]
    assert world.status().groups["tails_consumed"] == 1
    assert check_database(world.db) == []


def test_a_straggler_that_is_in_time_for_its_groups_batch_joins_it() -> None:
    world, leases = harness()
    world.finish_attempts(leases[:2])
    keep_alive(world, 10)
    world.finish_attempts(leases[2:])
    [group] = world.batch("0.0").groups or []
    assert len(group.trajectories) == 3 and group.baseline == []


def test_after_a_resume_head_and_straggler_are_trained_together() -> None:
    world, leases = harness()
    world.finish_attempts(leases[:2])
    keep_alive(world, 10)
    assert world.batch("0.0").groups is not None
    world.finish_attempts(leases[2:])
    world.start(0)
    [group] = world.batch("1.0").groups or []
    assert len(group.trajectories) == 3 and group.baseline == []
    assert check_database(world.db) == []


def test_the_last_batch_waits_for_every_straggler() -> None:
    world, leases = harness(steps=2)
    world.finish_attempts(leases[:2])
    keep_alive(world, 10)
    assert world.batch("0.0").groups is not None
    last = world.lease(9)
    world.finish_attempts(last)
    assert world.batch("0.1").groups is None
    world.finish_attempts(leases[2:])
    groups = world.batch("0.1").groups or []
    assert sum(len(group.trajectories) for group in groups) == 4


def test_a_straggler_beyond_the_staleness_bound_is_drawn_again() -> None:
    world, leases = harness()
    world.finish_attempts(leases[:2])
    keep_alive(world, 10)
    assert world.batch("0.0").groups is not None
    for step in (1, 2):
        world.finish_attempts([lease for lease in world.lease(3) if lease.group_id != "g000000"])
        keep_alive(world, 1)
        assert world.batch(f"0.{step}").groups is not None
    assert world.status().cancelled == {"stale": 1}
    world.flip("r0", "0.0")
    assert world.queue.ledger.groups["g000000t"].rollouts[0].attempt is None


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lag=st.integers(0, 3),
    grace=st.sampled_from([1.0, 5.0]),
    per_step=st.integers(1, 3),
    crash_at=st.one_of(st.none(), st.integers(1, 60)),
    odds=st.builds(Odds, fail=st.sampled_from([0.0, 0.1]), restart=st.sampled_from([0.0, 0.05])),
)
def test_every_rollout_is_trained_exactly_once_whatever_was_slow(
    seed: int, lag: int, grace: float, per_step: int, crash_at: int | None, odds: Odds
) -> None:
    config = make_config(
        rollout={"group_size": 4, "min_group": 2, "straggler_grace_s": grace, "attempt_timeout_s": 20.0},
        staleness={"max_policy_lag": lag},
        trainer={"steps": 4, "groups_per_step": per_step},
        coordinator={"infra_retries": 1000, "redraws": 1000},
        weights={"drain_timeout_s": 20.0},
    )
    world = World(config, seed, odds, slots=5, crash_at=crash_at)
    world.run()
    trained = Counter(row[0] for row in world.db.execute("SELECT rollout_id FROM consumptions"))
    assert set(trained.values()) == {1}
    assert set(trained) == {f"g{group:06d}-r{index}" for group in range(4 * per_step) for index in range(4)}
    assert check_database(world.db) == []
