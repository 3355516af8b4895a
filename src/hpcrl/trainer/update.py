"""One optimizer step: forward and backward over this rank's micro-batches, one reduction over ranks, clip, step.

The loss is the token mean over the whole minibatch: each micro-batch's sum is divided by the minibatch's trained tokens on all
ranks, gradients are then added up. Anything not finite on any rank spoils the reduced loss or norm, which all ranks see alike:
they all leave the step out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hpcrl.config.sections import TrainerSection
from hpcrl.trainer.batch import MicroBatch
from hpcrl.trainer.distributed import Ranks
from hpcrl.trainer.losses import TokenSums, clipped_loss_sum, ratio_sums
from hpcrl.trainer.model import Policy

__all__ = ["UpdateResult", "Updater", "make_optimizer"]


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Outcome of one minibatch, equal on all ranks. ``grad_norm`` is taken before clipping; not finite when ``skipped``."""

    sums: TokenSums
    grad_norm: float
    skipped: bool


def make_optimizer(policy: Policy, section: TrainerSection) -> torch.optim.Optimizer:
    """The configured optimizer over the policy's parameters."""
    chosen = section.optimizer
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[chosen.name]
    return kind(policy.parameters(), lr=chosen.lr, betas=chosen.betas, weight_decay=chosen.weight_decay)


class Updater:
    """Holds policy, optimizer and ranks; :meth:`minibatch` makes one optimizer step."""

    def __init__(self, policy: Policy, optimizer: torch.optim.Optimizer, ranks: Ranks, section: TrainerSection) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self._ranks = ranks
        self._section = section

    def set_learning_rate(self, step: int) -> float:
        """Linear warm-up: training step ``step`` (from 1) uses lr · min(1, step / warmup_steps). Returns the rate."""
        chosen = self._section.optimizer
        rate = chosen.lr * min(1.0, step / max(1, chosen.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def minibatch(self, batches: Sequence[MicroBatch], trained_tokens: int, *, first: bool) -> UpdateResult:
        """Step on this rank's ``batches`` (may be empty); ``trained_tokens`` is that of all ranks. ``first``: of this training step."""
        parameters = self.policy.parameters()
        sums = TokenSums()
        for batch in batches:
            self._accumulate(batch.to(self.policy.device), trained_tokens, sums, first)
        self._ranks.sum(sums.total)
        self._ranks.maximum(sums.largest)
        self._ranks.sum_gradients(parameters)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._section.optimizer.max_grad_norm))
        skipped = not (math.isfinite(norm) and math.isfinite(sums["loss"]))
        if not skipped:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return UpdateResult(sums, norm, skipped)

    def _accumulate(self, batch: MicroBatch, trained_tokens: int, sums: TokenSums, first: bool) -> None:
        clip = {"clip_low": self._section.clip_low, "clip_high": self._section.clip_high}
        logprobs, entropy = self.policy.logprobs(batch)
        loss = clipped_loss_sum(logprobs, batch.behaviour, batch.advantage, **clip)
        (loss / trained_tokens).backward()
        total, largest = ratio_sums(logprobs, batch.behaviour, entropy, batch.current, **clip, gap=first)
        sums.add({**total, "loss": float(loss.detach())}, largest)
