"""Advantages and the loss against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from hpcrl.trainer.advantages import group_advantages, shuffled
from hpcrl.trainer.losses import TokenSums, clipped_loss_sum, ratio_sums


def test_groups_are_keyed_by_id_whatever_their_order() -> None:
    rewards = torch.tensor([1.0, 5.0, 0.0, 7.0, 0.0])
    advantages, kept = group_advantages(rewards, ["a", "b", "a", "b", "a"], normalize=False)
    torch.testing.assert_close(advantages, torch.tensor([2 / 3, -1.0, -1 / 3, 1.0, -1 / 3]))
    assert kept.all()


def test_normalised_advantages_divide_by_the_biased_standard_deviation() -> None:
    advantages, _ = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), ["g"] * 4)
    std = math.sqrt(3) / 4
    torch.testing.assert_close(advantages, torch.tensor([0.75, -0.25, -0.25, -0.25]) / (std + 1e-4))


def test_zero_variance_groups_and_singletons_are_dropped() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.5])
    advantages, kept = group_advantages(rewards, ["same", "same", "g", "g", "alone"])
    assert kept.tolist() == [False, False, True, True, False]
    assert advantages[[0, 1, 4]].tolist() == [0, 0, 0]


def test_shuffling_permutes_over_the_whole_batch_and_repeats_by_seed() -> None:
    rewards = torch.arange(64.0)
    first = shuffled(rewards, 3)
    assert first.tolist() == shuffled(rewards, 3).tolist() != shuffled(rewards, 4).tolist()
    assert sorted(first.tolist()) == rewards.tolist()
    assert (first[:32] >= 32).any()


def test_clipped_loss_by_hand() -> None:
    behaviour = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5])
    logprobs = (behaviour + ratios.log()).requires_grad_()
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0])
    loss = clipped_loss_sum(logprobs, behaviour, advantages, clip_low=0.2, clip_high=0.3)
    # min(r·A, clip(r)·A): 1.3·2, −1.5·2, 0.5·2, −0.8·2
    assert loss.item() == pytest.approx(-(2.6 - 3.0 + 1.0 - 1.6))
    loss.backward()
    # Only where the unclipped branch is the smaller one does a gradient −r·A flow.
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, 3.0, -1.0, 0.0]))


def test_sums_by_hand() -> None:
    behaviour = torch.tensor([-1.0, -1.0])
    logprobs = behaviour + torch.tensor([1.5, 1.0]).log()
    entropy, current = torch.tensor([0.5, 0.7]), torch.tensor([True, False])
    sums = TokenSums()
    sums.add(*ratio_sums(logprobs, behaviour, entropy, current, clip_low=0.2, clip_high=0.2, gap=True))
    assert sums["tokens"] == 2
    assert sums["kl"] == pytest.approx(0.5 - math.log(1.5), abs=1e-6)
    assert sums["clipped"] == 1
    assert sums["entropy"] == pytest.approx(1.2)
    assert (sums["gap0_max"], sums["gap0_tokens"]) == (pytest.approx(math.log(1.5)), 1)
    assert (sums["ratio_max"], -sums["minus_ratio_min"]) == (pytest.approx(1.5), pytest.approx(1.0))
