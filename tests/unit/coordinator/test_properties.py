"""Properties of whole simulated runs, at random timing, failures, restarts and resumes."""

from __future__ import annotations

from collections import Counter

from coordinator_world import Odds, World, make_config
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.protocol.states import State
from hpcrl.protocol.version import PolicyVersion

odds = st.builds(
    Odds,
    fail=st.sampled_from([0.0, 0.05, 0.2]),
    silent=st.sampled_from([0.0, 0.03]),
    restart=st.sampled_from([0.0, 0.05]),
    refuse=st.sampled_from([0.0, 0.2]),
    far=st.sampled_from([0.0, 0.3, 1.0]),
)


@st.composite
def worlds(draw: st.DrawFn, crash: bool = False) -> World:
    replicas = draw(st.integers(1, 4))
    pinning = draw(st.sampled_from([{}, {"pin": "turn"}, {"pin": "token"}, {"slots": 2}]))
    config = make_config(
        staleness={"max_policy_lag": draw(st.integers(0, 3))},
        rollout={"group_size": draw(st.integers(1, 4)), "attempt_timeout_s": 20.0},
        trainer={"steps": draw(st.integers(2, 6)), "groups_per_step": draw(st.integers(1, 4))},
        coordinator={
            "infra_retries": draw(st.integers(0, 3)),
            "redraws": draw(st.integers(0, 3)),
            "failed_groups": 10_000,
        },
        weights={"quorum": draw(st.sampled_from([None, 1, replicas])), "drain_timeout_s": 20.0, **pinning},
        inference={"replicas": replicas},
    )
    return World(
        config,
        draw(st.integers(0, 10**6)),
        draw(odds),
        replicas=replicas,
        slots=draw(st.integers(1, 12)),
        crash_at=draw(st.integers(1, 60)) if crash else None,
        evaluates=draw(st.booleans()),
    )


def check(world: World) -> None:
    """What must hold of every batch, and of the whole run."""
    config = world.config
    bound = config.staleness.max_policy_lag
    kept: dict[int, list[str]] = {}
    for name in sorted(world.batches, key=PolicyVersion.parse):
        version, batch = PolicyVersion.parse(name), world.batches[name]
        assert batch.groups is not None and len(batch.groups) == config.trainer.groups_per_step
        for group in batch.groups:
            assert len(group.trajectories) >= min(2, config.rollout.group_size)
            for reference in group.trajectories:
                assert version.step - PolicyVersion.parse(reference.oldest_version).step <= bound
                assert reference.rollout_id.startswith(group.group_id + "-")
        for step in [step for step in kept if step >= version.step]:
            del kept[step]
        kept[version.step] = [t.rollout_id for group in batch.groups for t in group.trajectories]
    # A batch of a lost lineage was undone by the resume; what stands at the end was trained exactly once.
    trained = Counter(rollout for rollouts in kept.values() for rollout in rollouts)
    assert set(kept) == set(range(config.trainer.steps))
    assert max(trained.values()) == 1
    whole = Counter(rollout.rpartition("-")[0] for rollout in trained)
    step_of = {r.rpartition("-")[0]: step for step, rollouts in kept.items() for r in rollouts}
    assert len(whole) == len(step_of) == config.trainer.steps * config.trainer.groups_per_step
    status = world.status()
    assert status.duplicates == 0
    assert status.consumed == sum(trained.values()) == status.attempts[State.CONSUMED]
    assert sum(status.lag_histogram.values()) == status.consumed
    assert max(status.lag_histogram) <= bound
    without_waits: dict[str, object] = {"waits": []}  # who asks is not stored: they ask again
    before = world.status().model_copy(update=without_waits)
    world.restart()
    assert world.status().model_copy(update=without_waits) == before


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_every_run_ends_and_keeps_its_promises(world: World) -> None:
    world.run()
    check(world)


@settings(max_examples=40, deadline=None)
@given(worlds(crash=True))
def test_a_run_whose_trainer_dies_and_resumes_keeps_them_too(world: World) -> None:
    world.run()
    check(world)
