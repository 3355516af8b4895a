"""The loop's branches: order of calls, stopping early, answers that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from samples import config_for

from hpcrl.config import RunConfig, parse_config
from hpcrl.errors import DataError, InfraError, RunError
from hpcrl.metrics import read_metrics
from hpcrl.protocol import messages as m
from hpcrl.protocol.rundir import RunDir
from hpcrl.protocol.version import PolicyVersion
from hpcrl.trainer.checkpoint import latest_complete
from hpcrl.trainer.distributed import Ranks
from hpcrl.trainer.loop import Trainer, progress_line
from hpcrl.trainer.plan import plan_step

ALONE = Ranks(0, 1, torch.device("cpu"))


def config_with_eval(folder: Path, **trainer: Any) -> RunConfig:
    data = config_for(folder / "model", **trainer).model_dump()
    data["tasks"]["eval"] = "held-out"
    data["eval"] = {"every": 2, "samples": 2}
    return parse_config(data)


def test_calls_come_in_order_and_metrics_are_complete(tmp_path: Path) -> None:
    batches = worlds.prepare(tmp_path)
    config = config_with_eval(tmp_path, checkpoint_every=2)
    result, _, told, published = worlds.train(tmp_path, ALONE, config, batches)
    wanted = ["start checkpoint_step=None", "eval 0.0", "eval_status 0.0"]
    wanted += ["batch 0.0", "batch 0.0", "batch 0.1", "batch 0.1", "checkpointed 0.2", "eval 0.2", "eval_status 0.2"]
    wanted += ["batch 0.2", "batch 0.2", "checkpointed 0.3", "eval 0.3", "eval_status 0.3"]
    assert told == wanted
    assert [name for name, _ in published] == ["0.0", "0.1", "0.2", "0.3"]
    assert result["eval"] == {"0": 0.5, "2": 0.5, "3": 0.5}
    lines = [line for line in read_metrics(tmp_path / "run/metrics/trainer-0.jsonl") if "reward_mean" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    # The samples are those of the start model: exact at step 1, whose tokens alone are of the current version.
    assert lines[0]["logprob_gap_max_lag0"] <= 1e-5
    assert lines[1]["logprob_gap_max"] > 1e-4
    assert {"kl_behaviour", "clip_fraction", "entropy", "grad_norm", "pack_fill", "batch_wait_s", "train_s"} <= set(
        lines[2]
    )
    assert lines[0]["learning_rate"] == pytest.approx(5e-4)
    assert lines[1]["learning_rate"] == pytest.approx(1e-3)


def test_a_stop_request_writes_a_checkpoint_and_returns(tmp_path: Path) -> None:
    batches = worlds.prepare(tmp_path)
    client = worlds.FakeCoordinator(batches, m.TrainerStarted(lineage=0, step=0))
    run = RunDir(tmp_path / "run")
    stop = lambda: any(line == "batch 0.1" for line in client.told)  # noqa: E731
    trainer = Trainer(config_for(tmp_path / "model"), run, ALONE, client, should_stop=stop)
    result = trainer.run(worlds.FakePublisher(trainer.policy))
    assert (result["stopped_early"], result["version"]) == (True, "0.1")
    found = latest_complete(run.checkpoints)
    assert found is not None
    assert found.version == PolicyVersion(0, 1)
    assert client.told[-1] == "checkpointed 0.1"


@pytest.mark.parametrize("waits_for", ["batch", "evaluation"])
def test_a_trainer_does_not_wait_for_what_a_failed_publish_would_bring(tmp_path: Path, waits_for: str) -> None:
    batches = worlds.prepare(tmp_path)
    client = worlds.FakeCoordinator(batches, m.TrainerStarted(lineage=0, step=0))
    config = config_with_eval(tmp_path) if waits_for == "evaluation" else config_for(tmp_path / "model")
    trainer = Trainer(config, RunDir(tmp_path / "run"), ALONE, client)
    publisher = worlds.FakePublisher(trainer.policy)
    publisher.fails_at = "0.0" if waits_for == "evaluation" else "0.1"
    with pytest.raises(InfraError, match="was not taken"):
        trainer.run(publisher)
    assert client.told[-1] == ("eval 0.0" if waits_for == "evaluation" else "batch 0.0")


def test_a_coordinator_at_another_step_is_refused(tmp_path: Path) -> None:
    batches = worlds.prepare(tmp_path, steps=1)
    client = worlds.FakeCoordinator(batches, m.TrainerStarted(lineage=1, step=4))
    trainer = Trainer(config_for(tmp_path / "model"), RunDir(tmp_path / "run"), ALONE, client)
    with pytest.raises(RunError, match="starts at step 4, but this trainer's weights are of step 0"):
        trainer.run(worlds.FakePublisher(trainer.policy))


def test_a_row_that_is_not_what_was_reported_is_refused(tmp_path: Path) -> None:
    batches = worlds.prepare(tmp_path, steps=1)
    data = batches[0].model_dump()
    first = data["groups"][0]["trajectories"]
    first[0]["row"], first[1]["row"] = first[1]["row"], first[0]["row"]
    config = config_for(tmp_path / "model", steps=1, normalize_advantages=False)
    with pytest.raises(DataError, match=r"wrong_row: shards/w0-00000\.[0-9a-f]{32}\.h5 row"):
        worlds.train(tmp_path, ALONE, config, {0: m.Batch.model_validate(data)})


def test_a_trajectory_older_than_was_reported_is_refused(tmp_path: Path) -> None:
    batches = worlds.prepare(tmp_path, steps=1)
    data = batches[0].model_dump()
    data["groups"][0]["trajectories"][0]["oldest_version"] = "0.7"
    config = config_for(tmp_path / "model", steps=1)
    with pytest.raises(DataError, match=r"wrong_row: .*'0\.7'\) was reported"):
        worlds.train(tmp_path, ALONE, config, {0: m.Batch.model_validate(data)})


def batch_of(rewards: list[list[float]], version: str = "0.3") -> m.Batch:
    groups = []
    for g, values in enumerate(rewards):
        refs = [
            m.TrajectoryRef(
                attempt_id=f"g{g}-r{r}-a0",
                rollout_id=f"g{g}-r{r}",
                shard="s",
                row=r,
                reward=value,
                oldest_version="0.2",
                tokens=10 + r,
                trained_tokens=r,
            )
            for r, value in enumerate(values)
        ]
        groups.append(m.BatchGroup(group_id=f"g{g}", task_id="t", trajectories=refs))
    return m.Batch(version=version, groups=groups)


def test_minibatches_hold_kept_trajectories_once_and_do_not_depend_on_the_ranks() -> None:
    batch = batch_of([[0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 1, 0]])
    options: dict[str, Any] = {"minibatches": 2, "normalize": True, "shuffle_rewards": False, "seed": 1}
    one, three = (plan_step(batch, world=world, **options) for world in (1, 3))
    chosen = [sorted(index for share in minibatch.shares for index in share) for minibatch in one.minibatches]
    assert chosen == [sorted(i for share in minibatch.shares for i in share) for minibatch in three.minibatches]
    # Row 0 of each group has no trained token, group 1 has no variance.
    assert sorted(index for share in chosen for index in share) == [1, 2, 3, 9, 10, 11]
    assert sum(minibatch.trained_tokens for minibatch in one.minibatches) == 12
    assert (one.groups, one.effective_groups, set(one.lags)) == (3, 2, {1})


def test_shuffled_rewards_change_advantages_but_not_the_reported_rewards() -> None:
    batch = batch_of([[0, 1] * 4, [1, 0] * 4, [0, 0, 0, 1] * 2])
    options: dict[str, Any] = {"world": 1, "minibatches": 1, "normalize": True, "seed": 1}
    plain = plan_step(batch, shuffle_rewards=False, **options)
    mixed = plan_step(batch, shuffle_rewards=True, **options)
    assert plain.rewards == mixed.rewards
    assert plain.advantages != mixed.advantages
    assert mixed.advantages == plan_step(batch, shuffle_rewards=True, **options).advantages


def test_latecomers_are_judged_with_their_whole_group_of_which_nothing_is_trained_twice() -> None:
    whole, late = batch_of([[1, 0, 0, 1, 1]]), batch_of([[1, 1]])
    assert late.groups is not None
    late = late.model_copy(update={"groups": [late.groups[0].model_copy(update={"baseline": [1.0, 0.0, 0.0]})]})
    options: dict[str, Any] = {"world": 1, "minibatches": 1, "normalize": True, "shuffle_rewards": False, "seed": 1}
    expected, got = plan_step(whole, **options), plan_step(late, **options)
    assert got.advantages == expected.advantages[3:]
    assert len(got.refs) == 2 and got.rewards == [1.0, 1.0]


def test_a_batch_without_variance_makes_no_update_and_a_readable_line() -> None:
    assert (
        plan_step(batch_of([[1, 1]]), world=2, minibatches=2, normalize=True, shuffle_rewards=False, seed=0).minibatches
        == []
    )
    assert progress_line(3, 9, {"reward_mean": 0.5, "lag_max": 1}).startswith("step 3/9  reward 0.500  effective -")
