"""The trainer's talk with the coordinator. Rank 0 talks, all ranks get the answer; a stop request is noticed between two polls."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from hpcrl.errors import RunError
from hpcrl.protocol import client as calls
from hpcrl.protocol import messages as m
from hpcrl.protocol.version import PolicyVersion
from hpcrl.trainer.distributed import Ranks
from hpcrl.trajectory.names import QUARANTINE, quarantine

__all__ = ["Coordinator", "Feed", "Stopped"]

log = logging.getLogger(__name__)

Req = TypeVar("Req", bound=m.Message)
Rep = TypeVar("Rep", bound=m.Message)


class Coordinator(Protocol):
    """What rank 0 needs of ``protocol.client.Client``."""

    def call(self, endpoint: calls.Endpoint[Req, Rep], request: Req) -> Rep: ...


class Stopped(Exception):
    """The run is to stop early (time limit, a person); raised on every rank."""


class Feed:
    """``client`` is None on all ranks but 0. ``should_stop`` is asked on rank 0 between polls of ``poll_s`` seconds."""

    def __init__(
        self, ranks: Ranks, client: Coordinator | None, should_stop: Callable[[], bool], *, poll_s: float = 5.0
    ) -> None:
        self._ranks = ranks
        self._client = client
        self._should_stop = should_stop
        self._poll_s = poll_s
        self.check: Callable[[], None] = lambda: None
        """Asked as well, on rank 0: raises when what is waited for can never come."""

    def start(self, checkpoint_step: int | None) -> PolicyVersion:
        """Announce where this trainer stands; returns the version its weights now have. Raises RunError."""
        reply = self._ranks.decide(lambda: self._call(calls.START, m.TrainerStart(checkpoint_step=checkpoint_step)))
        expected = checkpoint_step or 0
        if reply.step != expected:
            raise RunError(
                f"the coordinator starts at step {reply.step}, but this trainer's weights are of step {expected}"
            )
        return PolicyVersion(reply.lineage, reply.step)

    def batch(self, version: PolicyVersion) -> m.Batch:
        """Wait for the batch that turns ``version`` into the next step. Raises Stopped."""

        def wait() -> m.Batch | None:
            while not self._stopped():
                batch = self._call(calls.BATCH, m.BatchRequest(version=str(version), wait_s=self._poll_s))
                if batch.groups is not None:
                    return batch
            return None

        return self._or_stopped(wait)

    def bad_shards(self, version: PolicyVersion, bad: dict[str, str], root: Path) -> None:
        """Shards (path under ``root`` → reason) of the batch for ``version`` cannot be read: put them aside and give the batch back."""

        def report() -> None:
            for shard, reason in bad.items():
                log.error("%s; it goes to %s/ and its samples are drawn again", reason, QUARANTINE)
                quarantine(root / shard)
                self._call(calls.BAD_SHARD, m.BadShard(version=str(version), shard=shard, reason=reason))

        self._ranks.decide(report)

    def off_policy(self, version: PolicyVersion, deviations: dict[str, float]) -> None:
        """Trajectories (attempt_id → deviation) of the batch for ``version`` are too far from its weights: give the batch back."""

        def report() -> None:
            log.info("%d trajectories deviate too far from %s and are drawn again", len(deviations), version)
            self._call(calls.OFF_POLICY, m.OffPolicy(version=str(version), deviations=deviations))

        self._ranks.decide(report)

    def evaluate(self, version: PolicyVersion, samples: int) -> m.EvalResult:
        """Have every held-out task sampled with exactly ``version``; waits for the result. Raises Stopped."""

        def wait() -> m.EvalResult | None:
            self._call(calls.EVAL, m.EvalRequest(version=str(version), samples=samples))
            while not self._stopped():
                status = self._call(calls.EVAL_STATUS, m.EvalStatusRequest(version=str(version), wait_s=self._poll_s))
                # All failed: there will never be a success rate to wait for.
                if status.success is not None or max(status.done, status.failed) >= status.total:
                    return status
            return None

        return self._or_stopped(wait)

    def checkpointed(self, version: PolicyVersion) -> None:
        """Tell the coordinator that a checkpoint of ``version`` is complete: consumptions up to it are final."""
        self._ranks.decide(lambda: self._call(calls.CHECKPOINTED, m.CheckpointDone(version=str(version))))

    def _call(self, endpoint: calls.Endpoint[Req, Rep], request: Req) -> Rep:
        if self._client is None:
            raise RunError("only trainer rank 0 talks to the coordinator")
        return self._client.call(endpoint, request)

    def _stopped(self) -> bool:
        if self._should_stop():
            return True
        self.check()
        return False

    def _or_stopped(self, wait: Callable[[], Rep | None]) -> Rep:
        found = self._ranks.decide(wait)
        if found is None:
            raise Stopped
        return found
