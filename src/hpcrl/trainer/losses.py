"""Clipped policy gradient against the recorded behaviour logprobs. Pure.

Functions return sums over tokens, never means: the caller divides by the number of trained tokens of the whole minibatch on all
ranks, so that ranks and micro-batches of any sizes give the same gradient.

Source: Schulman et al. 2017, "PPO" (equation 7), with one advantage per trajectory as in GRPO; the ratio is taken against the
policy that sampled (the behaviour), which may be older than the policy before the update.
"""

from __future__ import annotations

import torch

__all__ = ["TokenSums", "clipped_loss_sum", "ratio_sums"]


def clipped_loss_sum(
    logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float
) -> torch.Tensor:
    """Sum over tokens of −min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A), r = exp(logprobs − behaviour).

    All inputs (n,), one entry per trained token; gradients flow through ``logprobs`` only. Returns a scalar.
    """
    ratio = torch.exp(logprobs - behaviour)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


class TokenSums:
    """Sums and extremes of one minibatch that ranks add up: ``total`` by sum, ``largest`` by maximum. Plain float64 vectors."""

    TOTAL = ("tokens", "loss", "ratio", "kl", "clipped", "entropy", "gap0", "gap0_tokens")
    LARGEST = ("ratio_max", "minus_ratio_min", "gap0_max", "gap_max")

    def __init__(self) -> None:
        self.total = torch.zeros(len(self.TOTAL), dtype=torch.float64)
        self.largest = torch.full((len(self.LARGEST),), -torch.inf, dtype=torch.float64)

    def add(self, total: dict[str, float], largest: dict[str, float]) -> None:
        self.total += torch.tensor([total.get(name, 0.0) for name in self.TOTAL], dtype=torch.float64)
        other = torch.tensor([largest.get(name, -torch.inf) for name in self.LARGEST], dtype=torch.float64)
        self.largest = torch.maximum(self.largest, other)

    def merge(self, other: TokenSums) -> None:
        self.total += other.total
        self.largest = torch.maximum(self.largest, other.largest)

    def __getitem__(self, name: str) -> float:
        if name in self.TOTAL:
            return float(self.total[self.TOTAL.index(name)])
        return float(self.largest[self.LARGEST.index(name)])


@torch.no_grad()
def ratio_sums(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    entropy: torch.Tensor,
    current: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    gap: bool,
) -> tuple[dict[str, float], dict[str, float]]:
    """Sums and extremes for the metrics of one micro-batch, in the form :meth:`TokenSums.add` takes. All inputs (n,).

    KL is the k3 estimator r − 1 − log r, whose expectation under the behaviour is KL(behaviour || policy). With ``gap`` (weights
    not yet touched in this step) the distance to the recorded logprobs is measured, ``current`` marking the tokens that
    these very weights sampled.
    """
    if not len(logprobs):
        return {}, {}
    difference = (logprobs - behaviour).double()
    ratio = difference.exp()
    total = {
        "tokens": float(len(logprobs)),
        "ratio": float(ratio.sum()),
        "kl": float((ratio - 1 - difference).sum()),
        "clipped": float(((ratio < 1 - clip_low) | (ratio > 1 + clip_high)).sum()),
        "entropy": float(entropy.double().sum()),
    }
    largest = {"ratio_max": float(ratio.max()), "minus_ratio_min": float(-ratio.min())}
    if gap:
        distance = difference.abs()
        largest["gap_max"] = float(distance.max())
        if current.any():
            total |= {"gap0": float(distance[current].sum()), "gap0_tokens": float(current.sum())}
            largest["gap0_max"] = float(distance[current].max())
    return total, largest
