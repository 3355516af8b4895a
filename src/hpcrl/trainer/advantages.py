"""Group-relative advantages (GRPO). Pure.

Source: Shao et al. 2024, "DeepSeekMath" (section 4.1), outcome supervision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["ZERO_VARIANCE", "group_advantages", "shuffled"]

ZERO_VARIANCE = 1e-6
"""A group whose rewards differ by no more than this says nothing about what was better: it is left out of the batch."""

_STD_FLOOR = 1e-4


def group_advantages(
    rewards: torch.Tensor, groups: Sequence[str], *, normalize: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantage of each trajectory over its group, and which trajectories are kept.

    ``rewards`` float (n,); ``groups`` is the group_id of each. Advantage = reward − group mean, divided by the group's standard
    deviation (biased) when ``normalize``. Groups may have any sizes and any order. A group of zero variance (a group of one
    included) gets advantage 0 and is not kept: its trajectories enter neither the loss nor its denominator.
    Returns (advantages float32 (n,), kept bool (n,)).
    """
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    rewards = rewards.double()
    advantages = torch.zeros_like(rewards)
    kept = torch.zeros(len(rewards), dtype=torch.bool)
    for indices in members.values():
        own = rewards[indices]
        if own.max() - own.min() <= ZERO_VARIANCE:
            continue
        centred = own - own.mean()
        advantages[indices] = centred / (own.std(correction=0) + _STD_FLOOR) if normalize else centred
        kept[indices] = True
    return advantages.float(), kept


def shuffled(rewards: torch.Tensor, seed: int) -> torch.Tensor:
    """The rewards in a random order over the whole batch: a control run in which there is nothing to learn."""
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))
    return rewards[order]
