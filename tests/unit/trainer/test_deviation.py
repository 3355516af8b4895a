"""How far a policy is from the one that sampled: the measure, and what the trainer does with it, on one rank and on two."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import worlds
from samples import config_for, record_logprobs, tiny_model, trajectory, write_batch

from hpcrl.config import RunConfig, parse_config
from hpcrl.errors import ConfigError
from hpcrl.protocol import client as calls
from hpcrl.protocol import messages as m
from hpcrl.protocol.rundir import RunDir
from hpcrl.protocol.version import PolicyVersion
from hpcrl.trainer.deviation import ratio_deviations
from hpcrl.trainer.distributed import Ranks
from hpcrl.trainer.loop import Trainer
from hpcrl.trainer.model import Policy
from hpcrl.trajectory import Trajectory

ALONE = Ranks(0, 1, torch.device("cpu"))
VERSION = PolicyVersion(0, 0)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(tiny_model(3), 0.8)


def moved(sample: Trajectory, by: float) -> Trajectory:
    """As if the behaviour had given every sampled token a logprob that is ``by`` lower."""
    return replace(sample, logprobs=(sample.logprobs - by * sample.loss_mask).astype(np.float32))


@pytest.mark.parametrize("max_tokens", [1, 60, 10_000])
def test_the_deviation_is_the_mean_distance_of_the_ratio_from_1_per_trajectory(policy: Policy, max_tokens: int) -> None:
    own = [record_logprobs(policy, trajectory(index)) for index in range(3)]
    untrained = replace(own[0], loss_mask=np.zeros_like(own[0].loss_mask))
    given = [own[0], moved(own[1], math.log(2)), untrained, moved(own[2], 0.1)]
    found = ratio_deviations(policy, given, VERSION, max_tokens)
    assert found == pytest.approx([0.0, 1.0, 0.0, math.expm1(0.1)], abs=1e-4)


def test_ratios_above_and_below_1_do_not_cancel(policy: Policy) -> None:
    sample = record_logprobs(policy, trajectory(0, lengths=(40,)))
    trained = np.flatnonzero(sample.loss_mask)
    logprobs = sample.logprobs.copy()
    logprobs[trained[::2]] -= 0.5
    share = len(trained[::2]) / len(trained)
    [found] = ratio_deviations(policy, [replace(sample, logprobs=logprobs)], VERSION, 1000)
    assert found == pytest.approx(share * math.expm1(0.5), abs=1e-4)


def test_a_ratio_that_is_not_finite_deviates_without_end(policy: Policy) -> None:
    assert ratio_deviations(policy, [moved(trajectory(0), 1e30)], VERSION, 1000) == [math.inf]


def test_nothing_to_measure(policy: Policy) -> None:
    assert ratio_deviations(policy, [], VERSION, 1000) == []


def bounded(folder: Path, bound: float | None, **trainer: Any) -> RunConfig:
    data = config_for(folder / "model", **trainer).model_dump()
    return parse_config({**data, "staleness": {**data["staleness"], "max_ratio_dev": bound}})


def test_a_bound_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_ratio_dev"):
        bounded(tmp_path, 0.0)


class Redrawing(worlds.FakeCoordinator):
    """Gives ``fresh`` in place of the batch for 0.1 once that is given back."""

    def __init__(self, batches: dict[int, m.Batch], fresh: m.Batch) -> None:
        super().__init__(dict(batches), m.TrainerStarted(lineage=0, step=0))
        self.fresh = fresh
        self.given_back: list[m.OffPolicy] = []

    def call(self, endpoint: calls.Endpoint[Any, Any], request: Any) -> Any:
        if endpoint is calls.OFF_POLICY:
            self.given_back.append(request)
            self.batches[1] = self.fresh
        return super().call(endpoint, request)


def run(folder: Path, config: RunConfig, client: worlds.FakeCoordinator) -> list[tuple[str, torch.Tensor]]:
    trainer = Trainer(config, RunDir(folder / "run"), ALONE, client)
    publisher = worlds.FakePublisher(trainer.policy)
    trainer.run(publisher)
    return publisher.published


def test_a_batch_with_trajectories_too_far_leaves_no_trace_in_the_weights(tmp_path: Path) -> None:
    """The samples are the start model's: within the bound at step 0, past it after one step."""
    batches = worlds.prepare(tmp_path / "one", steps=2)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    shutil.copytree(tmp_path / "one", tmp_path / "three")
    start = m.TrainerStarted(lineage=0, step=0)
    first = run(tmp_path / "one", bounded(tmp_path / "one", None, steps=1), worlds.FakeCoordinator(batches, start))
    policy = Policy(tiny_model(3), worlds.TEMPERATURE)
    torch.nn.utils.vector_to_parameters(first[1][1], policy.parameters())
    made = [record_logprobs(policy, trajectory(500 + index)) for index in range(16)]
    fresh = write_batch(tmp_path / "two/run", made, "0.1", "new")
    write_batch(tmp_path / "three/run", made, "0.1", "new")

    free = worlds.FakeCoordinator({**batches, 1: fresh}, start)
    wanted = run(tmp_path / "two", bounded(tmp_path / "two", None, steps=2), free)
    client = Redrawing(batches, fresh)
    got = run(tmp_path / "three", bounded(tmp_path / "three", 1e-3, steps=2), client)
    assert [name for name, _ in got] == ["0.0", "0.1", "0.2"]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(wanted, got, strict=True))
    assert not torch.equal(got[1][1], got[2][1])
    [told] = client.given_back
    attempts = {ref.attempt_id for group in batches[1].groups or () for ref in group.trajectories}
    assert told.version == "0.1" and told.deviations and set(told.deviations) <= attempts
    assert all(value > 1e-3 for value in told.deviations.values())
