"""The trainer's life, on every rank alike.

    load weights (checkpoint or start model)
    START ──────────▶ coordinator: (lineage, step)
    publish L.S                                       the publisher sends in the background, replicas report READY themselves
    evaluate L.0
    while step < steps:
        BATCH(L.S) ── waits for complete groups ── ◀── workers seal shards, the coordinator joins them
        read own share of the shards; a bad one: quarantined, told (BAD_SHARD), BATCH again
        with staleness.max_ratio_dev: forward pass; trajectories past it: told (OFF_POLICY), BATCH again
        update
        publish L.(S+1)                               waits for the transfer of the version before
        checkpoint every N steps and at the end ──▶ CHECKPOINTED
        evaluate every M steps and at the end ── waits until replicas serve exactly this version and all attempts ended

Rank 0 talks to the coordinator and hands each answer to the others, so that all ranks take every branch together. Waiting is
bounded by the client's patience, and a request to stop is noticed between polls: then a checkpoint is written and run() returns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from hpcrl.config.schema import RunConfig
from hpcrl.metrics import MetricsWriter
from hpcrl.metrics.sink import Value
from hpcrl.protocol.messages import Batch
from hpcrl.protocol.rundir import RunDir
from hpcrl.protocol.version import PolicyVersion
from hpcrl.trainer.checkpoint import Checkpoint, Checkpoints, latest_complete
from hpcrl.trainer.distributed import Ranks
from hpcrl.trainer.feed import Coordinator, Feed, Stopped
from hpcrl.trainer.lora import add_adapters
from hpcrl.trainer.model import Policy
from hpcrl.trainer.step import TrainingStep
from hpcrl.trainer.update import Updater, make_optimizer
from hpcrl.trajectory.reader import ShardCache
from hpcrl.weights.digest import base_digest

__all__ = ["Trainer", "WeightPublisher"]

log = logging.getLogger(__name__)

_GAP_WARNING = 2e-3
"""Trainer and engine compute the same logprobs from the same float32 weights to about 1e-5; more means they differ."""


class WeightPublisher(Protocol):
    """Takes a copy of the weights as ``version`` and sends it in the background; tells the coordinator (PUBLISHED).

    Called by all ranks, in the same order. Blocks while the version before is still being sent.
    """

    def publish(self, version: PolicyVersion) -> None: ...

    def check(self) -> None:
        """Raise the error of a publish that has failed: nobody would ever sample with its version. Asked while rank 0 waits."""


class Trainer:
    """Make it on every rank, build the publisher on ``trainer.policy.model``, then :meth:`run`.

    Construction loads the newest complete checkpoint of the run directory, or the start model. ``client`` is needed on rank 0
    only. ``should_stop`` is asked on rank 0 between polls. Raises UserError for a model that cannot be loaded.
    """

    def __init__(
        self,
        config: RunConfig,
        run: RunDir,
        ranks: Ranks,
        client: Coordinator | None,
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        torch.set_num_threads(config.trainer.threads)
        torch.manual_seed(config.run.seed)
        self._config = config
        self._run = run
        self._ranks = ranks
        self._feed = Feed(ranks, client, should_stop)
        self.policy = Policy.load(config.model.path, config.model.dtype, ranks.device, config.rollout.temperature)
        if config.lora is not None:
            add_adapters(self.policy.model, config.lora, config.run.seed)
        optimizer = make_optimizer(self.policy, config.trainer)
        self._updater = Updater(self.policy, optimizer, ranks, config.trainer)
        self.base_digest = base_digest(config.model.path) if config.lora is not None and ranks.leads else None
        """Of the frozen weights under an adapter; only rank 0 reads them for it."""
        self._checkpoints = Checkpoints(run.checkpoints, ranks, config.trainer.keep_checkpoints, self.base_digest)
        self.resumed_from = self._resume()
        self._step = TrainingStep(config, self._updater, ranks, ShardCache(run.root))
        self._metrics = MetricsWriter(run.root, "trainer", ranks.rank, tensorboard=True) if ranks.leads else None
        self._evals: dict[int, float | None] = {}

    def _resume(self) -> PolicyVersion | None:
        """Rank 0 chooses the checkpoint, so that all ranks load the same one."""

        def choose() -> tuple[str, PolicyVersion] | None:
            found = latest_complete(self._run.checkpoints)
            return None if found is None else (str(found.path), found.version)

        chosen = self._ranks.decide(choose)
        if chosen is None:
            return None
        checkpoint = Checkpoint(Path(chosen[0]), PolicyVersion(*chosen[1]))
        self._checkpoints.load(checkpoint, self.policy, self._updater.optimizer)
        log.info("resuming from checkpoint %s", checkpoint.path)
        return checkpoint.version

    @property
    def parent_version(self) -> PolicyVersion | None:
        """The version whose weights are loaded, for the first manifest; None when they are the start model's."""
        return self.resumed_from

    def run(self, publisher: WeightPublisher) -> dict[str, Any]:
        """Train to the configured step, or until asked to stop.

        Returns version, steps, stopped_early, eval (step → success), wall_s. Raises DataError (a bad shard or record, named),
        RunError (another rank's failure), CoordinatorGone.
        """
        started = time.monotonic()
        self._feed.check = publisher.check
        version = self._feed.start(None if self.resumed_from is None else self.resumed_from.step)
        stopped = False
        saved = self.resumed_from
        try:
            publisher.publish(version)
            if version.step == 0:
                self._evaluate(version)
            while version.step < self._config.trainer.steps:
                version = self._one_step(version, publisher)
                if self._due(version.step, self._config.trainer.checkpoint_every):
                    saved = self._save(version)
                if version.step < self._config.trainer.steps and self._due(version.step, self._config.eval.every):
                    self._evaluate(version)
            if version.step:
                self._evaluate(version)
        except Stopped:
            stopped = True
            if version.step and (saved is None or saved.step != version.step):
                self._save(version)
            log.info("stopped early at version %s, checkpoint written", version)
        finally:
            if self._metrics is not None:
                self._metrics.close()
        return {
            "version": str(version),
            "steps": version.step,
            "stopped_early": stopped,
            "eval": {str(step): success for step, success in self._evals.items()},
            "wall_s": time.monotonic() - started,
        }

    def _due(self, step: int, every: int) -> bool:
        return step == self._config.trainer.steps or (every > 0 and step % every == 0)

    def _one_step(self, version: PolicyVersion, publisher: WeightPublisher) -> PolicyVersion:
        started = time.monotonic()
        batch = self._usable_batch(version)
        waited = time.monotonic() - started
        values = self._step.run(batch)
        following = PolicyVersion(version.lineage, version.step + 1)
        publish_started = time.monotonic()
        publisher.publish(following)
        values["publish_s"] = time.monotonic() - publish_started
        values["batch_wait_s"] = waited
        values["step_s"] = time.monotonic() - started
        values |= self._since_restart()
        self._report(following.step, values)
        return following

    def _since_restart(self) -> dict[str, Value]:
        """Once after a restart: how long there was no trained step. Taking the note away tells the launcher."""
        if not (self._ranks.leads and self._run.restarted.exists()):
            return {}
        waited = time.time() - float(self._run.restarted.read_text(encoding="utf-8"))
        self._run.restarted.unlink()
        log.info("first trained step %.1f s after the restart", waited)
        return {"restart_s": waited}

    def _usable_batch(self, version: PolicyVersion) -> Batch:
        """The batch for ``version``, asked for again until every shard of it can be read and no trajectory of it deviates too far
        from the present weights (the coordinator bounds how often)."""
        while True:
            batch = self._feed.batch(version)
            if bad := self._step.bad_shards(batch):
                self._feed.bad_shards(version, bad, self._run.root)
            elif far := self._step.off_policy(batch):
                self._feed.off_policy(version, far)
            else:
                return batch

    def _save(self, version: PolicyVersion) -> PolicyVersion:
        started = time.monotonic()
        self._checkpoints.save(self.policy, self._updater.optimizer, version)
        self._feed.checkpointed(version)
        self._write({"checkpoint_s": time.monotonic() - started}, version.step)
        return version

    def _evaluate(self, version: PolicyVersion) -> None:
        if self._config.tasks.eval is None:
            return
        started = time.monotonic()
        result = self._feed.evaluate(version, self._config.eval.samples)
        self._evals[version.step] = result.success
        values: dict[str, Value] = {
            "eval_attempts": result.done,
            "eval_failed": result.failed,
            "eval_s": time.monotonic() - started,
        }
        if result.success is not None:
            values["eval_success"] = result.success
        self._write(values, version.step)
        if self._ranks.leads:
            shown = "no scored attempt" if result.success is None else f"success {result.success:.3f}"
            log.info("evaluation of %s: %s (%d attempts, %d failed)", version, shown, result.total, result.failed)

    def _write(self, values: dict[str, Value], step: int) -> None:
        if self._metrics is not None:
            self._metrics.write(values, step)

    def _report(self, step: int, values: dict[str, Value]) -> None:
        self._write(values, step)
        if not self._ranks.leads:
            return
        log.info("%s", progress_line(step, self._config.trainer.steps, values))
        gap = values.get("logprob_gap_max_lag0")
        if isinstance(gap, float) and gap > _GAP_WARNING and self._config.model.dtype == "float32":
            log.warning("step %d: trainer and engine differ by %.1e in a logprob of the same version", step, gap)
        if values["skipped_updates"]:
            log.warning("step %d: %s updates left out (not finite)", step, values["skipped_updates"])


def progress_line(step: int, steps: int, values: dict[str, Value]) -> str:
    """One readable line about a step."""

    def show(name: str, form: str) -> str:
        value = values.get(name)
        return format(value, form) if isinstance(value, int | float) else "-"

    return (
        f"step {step}/{steps}  reward {show('reward_mean', '.3f')}  effective {show('effective_group_ratio', '.0%')}  "
        f"kl {show('kl_behaviour', '.4f')}  clip {show('clip_fraction', '.3f')}  entropy {show('entropy', '.3f')}  "
        f"grad {show('grad_norm', '.2f')}  lag ≤{show('lag_max', 'd')}  gap {show('logprob_gap_max_lag0', '.1e')}  | "
        f"wait {show('batch_wait_s', '.1f')} s  train {show('train_s', '.1f')} s  publish {show('publish_s', '.2f')} s"
    )
