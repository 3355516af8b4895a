"""One training step on one batch: plan, read own trajectories, pack, update; then the step's metrics. No coordinator, no publishing."""

from __future__ import annotations

import statistics
import time
from collections import Counter

import torch

from hpcrl.config.schema import RunConfig
from hpcrl.errors import DataError
from hpcrl.metrics.sink import Value
from hpcrl.protocol.messages import Batch, TrajectoryRef
from hpcrl.protocol.version import PolicyVersion
from hpcrl.trainer.batch import MicroBatch, pack, sequences_of
from hpcrl.trainer.deviation import ratio_deviations
from hpcrl.trainer.distributed import Ranks
from hpcrl.trainer.losses import TokenSums
from hpcrl.trainer.plan import StepPlan, plan_step
from hpcrl.trainer.update import Updater, UpdateResult
from hpcrl.trajectory.reader import ShardCache
from hpcrl.trajectory.schema import Trajectory

__all__ = ["TrainingStep"]


class TrainingStep:
    """Makes steps; the same object serves the whole run. All ranks call :meth:`run` with the same batch."""

    def __init__(self, config: RunConfig, updater: Updater, ranks: Ranks, shards: ShardCache) -> None:
        self._config = config
        self._updater = updater
        self._ranks = ranks
        self._shards = shards

    def run(self, batch: Batch) -> dict[str, Value]:
        """Update the policy on ``batch`` (which is for the weights ``batch.version``) and return the step's metrics.

        Raises DataError naming a bad shard, or an attempt whose record does not bear out what was reported of it.
        """
        plan = self._plan(batch)
        version = PolicyVersion.parse(batch.version)
        started = time.monotonic()
        packs, oldest_age = self._ranks.together(lambda: self._read(plan, version))
        read_at = time.monotonic()
        rate = self._updater.set_learning_rate(version.step + 1)
        results = [
            self._updater.minibatch(packs[index], minibatch.trained_tokens, first=index == 0)
            for index, minibatch in enumerate(plan.minibatches)
        ]
        values = {**_batch_metrics(plan), **_update_metrics(results), "learning_rate": rate}
        values["read_s"] = read_at - started
        values["train_s"] = time.monotonic() - read_at
        values["sample_age_max_s"], values["tokens_forward"], values["pack_fill"] = self._shapes(packs, oldest_age)
        return values

    def bad_shards(self, batch: Batch) -> dict[str, str]:
        """Shards of the batch that some rank cannot read, with the reason; the same answer on every rank."""
        plan = self._plan(batch)
        own = (index for minibatch in plan.minibatches for index in minibatch.shares[self._ranks.rank])
        found = self._ranks.gather(self._shards.bad_among(plan.refs[index].shard for index in own))
        return {shard: reason for bad in found for shard, reason in bad.items()}

    def off_policy(self, batch: Batch) -> dict[str, float]:
        """Attempts of the batch that would be trained although they deviate from the present weights by more than
        ``staleness.max_ratio_dev``, with their deviation; the same answer on every rank. Empty, at no cost, without that bound."""
        bound = self._config.staleness.max_ratio_dev
        if bound is None:
            return {}
        plan, version = self._plan(batch), PolicyVersion.parse(batch.version)
        own = [index for minibatch in plan.minibatches for index in minibatch.shares[self._ranks.rank]]

        def measure() -> dict[str, float]:
            refs = [plan.refs[index] for index in own]
            found = self._shards.read_many([(ref.shard, ref.row) for ref in refs])
            deviations = ratio_deviations(
                self._updater.policy, found, version, self._config.trainer.max_tokens_per_pack
            )
            return {ref.attempt_id: value for ref, value in zip(refs, deviations, strict=True) if not value <= bound}

        parts = self._ranks.gather(self._ranks.together(measure))
        return {attempt_id: value for part in parts for attempt_id, value in part.items()}

    def _plan(self, batch: Batch) -> StepPlan:
        section = self._config.trainer
        return plan_step(
            batch,
            world=self._ranks.world,
            minibatches=section.minibatches,
            normalize=section.normalize_advantages,
            shuffle_rewards=section.shuffle_rewards,
            seed=self._config.run.seed,
        )

    def _read(self, plan: StepPlan, version: PolicyVersion) -> tuple[list[list[MicroBatch]], float]:
        """Own trajectories of every minibatch, packed; and the age of the oldest in seconds."""
        own = [minibatch.shares[self._ranks.rank] for minibatch in plan.minibatches]
        refs = [plan.refs[index] for share in own for index in share]
        found = iter(self._shards.read_many([(ref.shard, ref.row) for ref in refs]))
        packs: list[list[MicroBatch]] = []
        first_token_at = now = time.time()
        for share in own:
            sequences = []
            for index in share:
                trajectory = next(found)
                _check(trajectory, plan.refs[index])
                first_token_at = min(first_token_at, trajectory.first_token_at)
                sequences += sequences_of(trajectory, plan.advantages[index], version)
            packs.append(pack(sequences, self._config.trainer.max_tokens_per_pack))
        return packs, now - first_token_at

    def _shapes(self, packs: list[list[MicroBatch]], oldest_age: float) -> tuple[float, int, float]:
        """Of all ranks together: age of the oldest trajectory, tokens of the forward passes, tokens / cells."""
        oldest = torch.tensor([oldest_age], dtype=torch.float64)
        micro = [batch for batches in packs for batch in batches]
        sizes = torch.tensor([[batch.tokens, batch.input_ids.numel()] for batch in micro] or [[0, 0]]).sum(0)
        self._ranks.maximum(oldest)
        self._ranks.sum(sizes)
        tokens, cells = sizes.tolist()
        return float(oldest), tokens, tokens / max(1, cells)


def _check(trajectory: Trajectory, ref: TrajectoryRef) -> None:
    """The shard's row must be what the coordinator was told: a wrong join here would train the wrong tokens, or tokens older
    than the bound on staleness."""
    oldest = str(trajectory.oldest_version)
    got = (trajectory.attempt_id, trajectory.tokens, trajectory.trained_tokens, trajectory.reward, oldest)
    told = (ref.attempt_id, ref.tokens, ref.trained_tokens, ref.reward, ref.oldest_version)
    if got != told:
        raise DataError("wrong_row", f"{ref.shard} row {ref.row} holds {got}, but {told} was reported")


def _batch_metrics(plan: StepPlan) -> dict[str, Value]:
    lags = Counter(plan.lags)
    return {
        "trajectories": len(plan.refs),
        "groups": plan.groups,
        "effective_group_ratio": plan.effective_groups / max(1, plan.groups),
        "reward_mean": statistics.fmean(plan.rewards) if plan.rewards else 0.0,
        "reward_std": statistics.pstdev(plan.rewards) if plan.rewards else 0.0,
        "lag_histogram": {str(lag): count for lag, count in sorted(lags.items())},
        "lag_max": max(lags, default=0),
    }


def _update_metrics(results: list[UpdateResult]) -> dict[str, Value]:
    """Means are over trained tokens of all minibatches; the reading of an update that was left out counts only as skipped."""
    sums = TokenSums()
    for result in results:
        if not result.skipped:
            sums.merge(result.sums)
    values: dict[str, Value] = {
        "skipped_updates": sum(result.skipped for result in results),
        "tokens_trained": int(sums["tokens"]),
    }
    tokens = sums["tokens"]
    if not tokens:
        return values
    norms = [result.grad_norm for result in results if not result.skipped]
    values |= {
        "loss": sums["loss"] / tokens,
        "ratio_mean": sums["ratio"] / tokens,
        "ratio_min": -sums["minus_ratio_min"],
        "ratio_max": sums["ratio_max"],
        "kl_behaviour": sums["kl"] / tokens,
        "clip_fraction": sums["clipped"] / tokens,
        "entropy": sums["entropy"] / tokens,
        "grad_norm": statistics.fmean(norms),
    }
    if sums["gap0_tokens"]:
        values["logprob_gap_max_lag0"] = sums["gap0_max"]
        values["logprob_gap_mean_lag0"] = sums["gap0"] / sums["gap0_tokens"]
    if not results[0].skipped:
        values["logprob_gap_max"] = sums["gap_max"]
    return values
