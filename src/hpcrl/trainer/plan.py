"""Who trains what: batch → minibatches → ranks. Pure, and the same on every rank; the minibatches do not depend on the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hpcrl.protocol.messages import Batch, TrajectoryRef
from hpcrl.protocol.version import PolicyVersion
from hpcrl.trainer.advantages import group_advantages, shuffled

__all__ = ["Minibatch", "StepPlan", "balanced", "plan_step"]

_SEED_STEP = 1_000_003
"""Spreads run seeds, so that the steps of neighbouring seeds do not share random orders."""


@dataclass(frozen=True, slots=True)
class Minibatch:
    """One optimizer step: ``shares[rank]`` are indices into ``StepPlan.refs``; ``trained_tokens`` is that of all ranks together."""

    shares: list[list[int]]
    trained_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One training step. ``advantages`` and ``refs`` have one entry per trajectory of the batch, in the batch's order."""

    refs: list[TrajectoryRef]
    advantages: list[float]
    minibatches: list[Minibatch]
    groups: int
    effective_groups: int
    rewards: list[float]
    lags: list[int]


def plan_step(
    batch: Batch, *, world: int, minibatches: int, normalize: bool, shuffle_rewards: bool, seed: int
) -> StepPlan:
    """Advantages, minibatches and each rank's share. Trajectories of zero-variance groups, and those without a trained token,
    are in no minibatch; a minibatch that would be empty is left out."""
    version = PolicyVersion.parse(batch.version)
    refs = [ref for group in batch.groups or () for ref in group.trajectories]
    group_ids = [group.group_id for group in batch.groups or () for _ in group.trajectories]
    seed = seed * _SEED_STEP + version.step
    rewards = torch.tensor([ref.reward for ref in refs], dtype=torch.float64)
    used = shuffled(rewards, seed) if shuffle_rewards else rewards
    # Rewards of latecomers' groups that an earlier batch trained: part of the group's mean and deviation only.
    earlier = [(group.group_id, reward) for group in batch.groups or () for reward in group.baseline]
    everybody = torch.cat([used, torch.tensor([reward for _, reward in earlier], dtype=torch.float64)])
    everybodys = [*group_ids, *(group_id for group_id, _ in earlier)]
    advantages, kept = (values[: len(refs)] for values in group_advantages(everybody, everybodys, normalize=normalize))
    usable = [index for index in torch.nonzero(kept).flatten().tolist() if refs[index].trained_tokens]
    order = torch.randperm(len(usable), generator=torch.Generator().manual_seed(seed)).tolist()
    size = -(-len(usable) // minibatches)
    plans = []
    for start in range(0, len(usable), max(1, size)):
        chosen = [usable[position] for position in order[start : start + size]]
        shares = balanced([refs[index].tokens for index in chosen], world)
        plans.append(
            Minibatch(
                shares=[[chosen[position] for position in share] for share in shares],
                trained_tokens=sum(refs[index].trained_tokens for index in chosen),
            )
        )
    return StepPlan(
        refs=refs,
        advantages=advantages.tolist(),
        minibatches=plans,
        groups=len(batch.groups or ()),
        effective_groups=len({group for group, keep in zip(group_ids, kept.tolist(), strict=True) if keep}),
        rewards=rewards.tolist(),
        lags=[version.step - PolicyVersion.parse(ref.oldest_version).step for ref in refs],
    )


def balanced(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of ``sizes`` per rank, loads as equal as longest-first greedy makes them. Deterministic."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda position: (-sizes[position], position)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += sizes[index]
    return shares
