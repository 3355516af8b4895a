"""The one list of metric names: unit, layer and meaning. A name that is not here is refused by the sink.

``kind`` says how values of several processes or times combine: a gauge is a reading, a counter only grows within a process, a
duration is seconds of one event (summarised by percentiles), a histogram maps a bucket to a count.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from hpcrl.errors import UserError

__all__ = ["METRICS", "Metric", "metric"]

Layer = Literal["inference", "environment", "data", "training", "cost"]
Kind = Literal["gauge", "counter", "duration", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, for example ``Metric("train_s", "s", "training", "duration", "…")``."""

    name: str
    unit: str
    layer: Layer
    kind: Kind
    text: str


_TRAINING = (
    Metric("reward_mean", "1", "training", "gauge", "mean reward of the batch's trajectories"),
    Metric("reward_std", "1", "training", "gauge", "standard deviation of the batch's rewards"),
    Metric("loss", "1", "training", "gauge", "policy loss, mean over trained tokens and minibatches"),
    Metric("ratio_mean", "1", "training", "gauge", "mean of new/behaviour probability over trained tokens"),
    Metric("ratio_min", "1", "training", "gauge", "smallest new/behaviour probability of a trained token"),
    Metric("ratio_max", "1", "training", "gauge", "largest new/behaviour probability of a trained token"),
    Metric("kl_behaviour", "nat", "training", "gauge", "KL(behaviour || policy) per trained token, k3 estimator"),
    Metric(
        "clip_fraction", "1", "training", "gauge", "share of trained tokens whose ratio lies outside the clip range"
    ),
    Metric("entropy", "nat", "training", "gauge", "mean entropy of the policy at trained tokens"),
    Metric("grad_norm", "1", "training", "gauge", "gradient norm before clipping, mean over minibatches"),
    Metric("learning_rate", "1", "training", "gauge", "learning rate of the step"),
    Metric(
        "logprob_gap_max_lag0",
        "nat",
        "training",
        "gauge",
        "largest |trainer − recorded| logprob, tokens of the current version",
    ),
    Metric(
        "logprob_gap_mean_lag0",
        "nat",
        "training",
        "gauge",
        "mean |trainer − recorded| logprob, tokens of the current version",
    ),
    Metric(
        "logprob_gap_max",
        "nat",
        "training",
        "gauge",
        "largest |trainer − recorded| logprob, first minibatch, any version",
    ),
    Metric(
        "skipped_updates",
        "1",
        "training",
        "counter",
        "optimizer steps left out because a gradient or loss was not finite",
    ),
    Metric("tokens_trained", "token", "training", "gauge", "sampled tokens that entered the step's loss"),
    Metric(
        "tokens_forward",
        "token",
        "training",
        "gauge",
        "tokens of the step's forward passes, prompts and tool output included",
    ),
    Metric("pack_fill", "1", "training", "gauge", "tokens / cells of the packed micro-batches"),
    Metric("batch_wait_s", "s", "training", "duration", "waiting for the batch"),
    Metric("read_s", "s", "training", "duration", "reading the batch's shards"),
    Metric("train_s", "s", "training", "duration", "forward, backward and optimizer of one step"),
    Metric("publish_s", "s", "training", "duration", "the trainer stood still to snapshot a version for publishing"),
    Metric("checkpoint_s", "s", "training", "duration", "writing a checkpoint"),
    Metric("step_s", "s", "training", "duration", "one training step from asking for the batch to published weights"),
    Metric(
        "restart_s",
        "s",
        "training",
        "duration",
        "from the end of the MPI world, or the start of a continued job, to its first trained step",
    ),
    Metric("eval_success", "1", "training", "gauge", "mean reward on the held-out tasks, exactly this version"),
    Metric("eval_attempts", "1", "training", "gauge", "held-out attempts that have ended"),
    Metric("eval_failed", "1", "training", "gauge", "held-out attempts without a score"),
    Metric("eval_s", "s", "training", "duration", "one evaluation, from request to result"),
)

_DATA = (
    Metric("trajectories", "1", "data", "gauge", "trajectories in the batch"),
    Metric("groups", "1", "data", "gauge", "groups in the batch"),
    Metric("effective_group_ratio", "1", "data", "gauge", "share of the batch's groups whose rewards differ"),
    Metric("lag_histogram", "1", "data", "histogram", "policy lag in steps → trajectories of the batch"),
    Metric("lag_max", "step", "data", "gauge", "largest policy lag in the batch"),
    Metric("sample_age_max_s", "s", "data", "gauge", "oldest trajectory of the batch: since its first token"),
    Metric("score_wait_s", "s", "data", "duration", "an attempt waited for its score"),
    Metric("seal_s", "s", "data", "duration", "writing and sealing one shard"),
    Metric("trajectories_sealed", "1", "data", "counter", "trajectories sealed by a worker"),
    Metric("trajectory_tokens", "token", "data", "gauge", "tokens of one trajectory"),
)

_INFERENCE = (
    Metric("requests", "1", "inference", "counter", "model calls answered by a replica"),
    Metric("tokens_prompt", "token", "inference", "counter", "prompt tokens sent to the engine"),
    Metric("tokens_generated", "token", "inference", "counter", "tokens sampled"),
    Metric("transfer_s", "s", "inference", "duration", "receiving one version"),
    Metric("verify_s", "s", "inference", "duration", "checking one version's digests"),
    Metric("flip_pause_s", "s", "inference", "duration", "generation paused to switch to a new version"),
    Metric("engine_restarts", "1", "inference", "counter", "times the engine was started again after it died"),
)

_ENVIRONMENT = (
    Metric("sandbox_start_s", "s", "environment", "duration", "starting one sandbox"),
    Metric("pool_hits", "1", "environment", "counter", "sandboxes of attempts and scorings that were started ahead"),
    Metric("pool_misses", "1", "environment", "counter", "those that found none started ahead, and were started then"),
    Metric("model_s", "s", "environment", "duration", "an attempt's model calls together, as the harness sees them"),
    Metric("queue_s", "s", "environment", "duration", "part of model_s that calls waited at the proxy"),
    Metric("generate_s", "s", "environment", "duration", "part of model_s that the engine took"),
    Metric("attempt_s", "s", "environment", "duration", "one attempt, from lease to artifact"),
    Metric("turns", "1", "environment", "gauge", "model calls of one attempt"),
    Metric("scoring_s", "s", "environment", "duration", "scoring one attempt"),
    Metric("failures", "1", "environment", "histogram", "kind:reason → failures of one process"),
)

_ATTEMPTS = (
    Metric("commands_s", "s", "environment", "duration", "an attempt's commands together"),
    Metric("commands", "1", "environment", "gauge", "commands of one attempt"),
    Metric("commands_timed_out", "1", "environment", "gauge", "commands of one attempt that overran their time"),
    Metric("artifact_s", "s", "environment", "duration", "packing and storing an attempt's changed files"),
    Metric("record_s", "s", "environment", "duration", "fetching an attempt's record from its proxy"),
    Metric("attempt_ends", "1", "environment", "histogram", "how attempts ended (no_command, max_turns, …) → count"),
    Metric("policy_failures", "1", "environment", "histogram", "what the agent broke → attempts"),
    Metric("tokens_sampled", "token", "data", "gauge", "sampled tokens of one trajectory"),
    Metric(
        "seal_wait_s", "s", "data", "duration", "a scored trajectory waited until its shard was sealed and reported"
    ),
    Metric("reports_rejected", "1", "data", "histogram", "reason → reports of one process that came too late"),
)

METRICS: dict[str, Metric] = {
    entry.name: entry for entry in (*_TRAINING, *_DATA, *_INFERENCE, *_ENVIRONMENT, *_ATTEMPTS)
}
"""Name → metric. All layers."""


def metric(name: str) -> Metric:
    """The metric called ``name``. Raises UserError naming the nearest one."""
    found = METRICS.get(name)
    if found is None:
        near = difflib.get_close_matches(name, METRICS, n=1)
        hint = f"did you mean {near[0]}?" if near else "add it to metrics/names.py"
        raise UserError(f"unknown metric {name!r}; {hint}")
    return found
