"""How far the present policy is from the one that sampled a trajectory: the third unit of staleness.

    deviation = mean over trained tokens of |π_now(token) / π_behaviour(token) − 1|

π_behaviour is what was recorded, both after temperature. The mean's expectation over tokens of the behaviour policy is twice the total
variation between the two policies; unlike the product of ratios over the trajectory it does not grow with length, and ratios above
and below 1 do not cancel. A policy that has not changed gives its numerical gap (about 1e-5 in float32).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hpcrl.protocol.version import PolicyVersion
from hpcrl.trainer.batch import pack, sequences_of
from hpcrl.trainer.model import Policy
from hpcrl.trajectory.schema import Trajectory

__all__ = ["ratio_deviations"]


@torch.no_grad()
def ratio_deviations(
    policy: Policy, trajectories: Iterable[Trajectory], version: PolicyVersion, max_tokens: int
) -> list[float]:
    """One deviation per trajectory, in order (0.0 without trained tokens; not finite where a ratio is not). ``max_tokens`` per pass."""
    found = list(trajectories)
    # Packing moves along what belongs to a token: here the trajectory's number stands in for an advantage.
    numbered = [part for index, each in enumerate(found) for part in sequences_of(each, float(index), version)]
    totals = torch.zeros(2, len(found), dtype=torch.float64)
    for batch in pack(numbered, max_tokens):
        moved = batch.to(policy.device)
        logprobs, _ = policy.logprobs(moved)
        distance = (logprobs - moved.behaviour).double().expm1().abs().cpu()
        totals.index_add_(1, batch.advantage.long(), torch.stack([distance, torch.ones_like(distance)]))
    return (totals[0] / totals[1].clamp(min=1)).tolist()
