"""A scorer: runs the private tests on artifacts, in fresh sandboxes. Wiring and one loop; ``python -m hpcrl.run.scorer``.

    lease loop      free slots? ──► LEASE_SCORING (long poll) ──► one task per attempt
    scoring task    artifact, verified by digest ──► scoring.score ──► SCORED or SCORING_FAILED (batched) ──► frees its slot

A scorer that dies loses nothing: what it held is offered again when one of its name begins (SCORER_START), or past the deadline. A
failing attempt is recorded in one place, ``_one``; the loop fails only when the coordinator is gone, and that ends the scorer.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from pathlib import Path

from hpcrl.config import RunConfig
from hpcrl.errors import DataError, InfraError, UserError
from hpcrl.metrics import MetricsWriter
from hpcrl.protocol import client as calls
from hpcrl.protocol import messages as m
from hpcrl.protocol.rundir import RunDir
from hpcrl.run.batching import Batcher
from hpcrl.run.ending import cancel_all
from hpcrl.run.role import role_main
from hpcrl.run.sandboxes import Images, limits_of, node_arguments, open_pool, pool_values, process_name, unusable
from hpcrl.sandbox.pool import SandboxPool
from hpcrl.scoring.artifacts import load_artifact
from hpcrl.scoring.private import PrivateTask, load_private
from hpcrl.scoring.runner import score

__all__ = ["Scorer", "main"]

log = logging.getLogger(__name__)

_POLL_S = 10.0
_COALESCE_S = 0.01
"""After a slot frees, others follow: one LEASE_SCORING for several."""


class Scorer:
    """See the module's docstring. ``client`` is the coordinator's, ``pool`` an open pool of sandboxes."""

    def __init__(
        self,
        run: RunDir,
        config: RunConfig,
        scorer_id: str,
        client: calls.AsyncClient,
        pool: SandboxPool,
        images: Images,
        metrics: MetricsWriter,
    ) -> None:
        self._run = run
        self._id = scorer_id
        self._slots = config.scoring.concurrency
        self._client = client
        self._pool = pool
        self._images = images
        self._limits = limits_of(config)
        self._metrics = metrics
        self._tasks: dict[str, PrivateTask] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._freed = asyncio.Event()
        self._error: BaseException | None = None
        self._scored: Batcher[m.ScoreItem] = Batcher(self._send_scored, lambda item: item.attempt_id)
        self._failures: Batcher[m.FailureItem] = Batcher(self._send_failed, lambda item: item.attempt_id)

    def stop(self) -> None:
        """End soon; what is being scored is left to others."""
        self._stop.set()

    async def work(self) -> None:
        """Score until the coordinator says stop or :meth:`stop`. Raises CoordinatorGone, or whatever broke the loop."""
        loops = {asyncio.create_task(self._lease_loop()), asyncio.create_task(self._stop.wait())}
        done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
        await cancel_all((*loops, *self._running))
        for task in done:
            task.result()
        if self._error is not None:
            raise self._error

    async def _lease_loop(self) -> None:
        while True:
            free = self._slots - len(self._running)
            if free <= 0:
                self._freed.clear()
                await self._freed.wait()
                await asyncio.sleep(_COALESCE_S)
                continue
            request = m.ScoringRequest(scorer_id=self._id, n=free, wait_s=_POLL_S)
            reply = await self._client.call(calls.LEASE_SCORING, request)
            for lease in reply.leases:
                task = asyncio.create_task(self._one(lease), name=lease.attempt_id)
                self._running.add(task)
                task.add_done_callback(self._done)
            if reply.stop:
                return

    def _done(self, task: asyncio.Task[None]) -> None:
        """A failing *report* ends the scorer: nothing it does would be heard any more."""
        self._running.discard(task)
        self._freed.set()
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
            self.stop()

    async def _one(self, lease: m.ScoringLease) -> None:
        """Score one attempt; the one place where its failure is recorded, as data."""
        try:
            async with asyncio.timeout(max(0.0, lease.deadline_at - time.time())):
                item = await self._score(lease)
        except TimeoutError:
            await self._failed(lease, InfraError("scoring_timeout", "not scored before its lease ended"))
        except UserError as error:
            await self._failed(lease, unusable(error))
        except (InfraError, DataError) as error:
            await self._failed(lease, error)
        except Exception as error:  # the one recording point: a bug here costs one attempt, not the scorer
            log.exception("attempt %s", lease.attempt_id)
            await self._failed(lease, InfraError("scorer_bug", f"{type(error).__name__}: {error}"))
        else:
            refused = await self._scored.put(item)
            if refused is not None:
                log.info("attempt %s: score came too late: %s", lease.attempt_id, refused)
                self._metrics.write({"reports_rejected": {refused: 1}})
            self._metrics.write({"scoring_s": item.scoring_s, **pool_values(self._pool)})

    async def _score(self, lease: m.ScoringLease) -> m.ScoreItem:
        task = self._tasks.get(lease.task_dir)
        if task is None:
            task = self._tasks[lease.task_dir] = await asyncio.to_thread(load_private, Path(lease.task_dir))
        artifact = await asyncio.to_thread(load_artifact, self._run, lease.artifact, lease.digest)
        image = await self._images.for_attempt(task.public)
        result = await score(task, artifact, image, self._limits, self._pool, lease.attempt_id)
        if result.policy_failure is not None:
            # As code: what the tests printed must not write lines of the log, or to the terminal that shows it.
            log.info("attempt %s: %s: %r", lease.attempt_id, result.policy_failure, result.detail.strip()[-300:])
        return m.ScoreItem(
            attempt_id=lease.attempt_id,
            reward=result.reward,
            rewards=result.rewards,
            verifier_version=result.verifier_version,
            scoring_s=result.duration_s,
            policy_failure=result.policy_failure,
        )

    async def _failed(self, lease: m.ScoringLease, error: InfraError | DataError) -> None:
        log.warning("attempt %s: %s failure: %s", lease.attempt_id, error.kind, error)
        kind: m.FailureKind = "data" if isinstance(error, DataError) else "infra"
        self._metrics.write({"failures": {f"{kind}:{error.reason}": 1}})
        await self._failures.put(
            m.FailureItem(attempt_id=lease.attempt_id, kind=kind, reason=error.reason, message=str(error)[:2000])
        )

    async def _send_scored(self, items: list[m.ScoreItem]) -> m.Ack:
        return await self._client.call(calls.SCORED, m.ScoreReport(scorer_id=self._id, items=items))

    async def _send_failed(self, items: list[m.FailureItem]) -> m.Ack:
        return await self._client.call(calls.SCORING_FAILED, m.FailureReport(reporter_id=self._id, items=items))


async def _serve(run: RunDir, config: RunConfig, index: int) -> None:
    scorer_id = process_name(index)
    client = calls.AsyncClient(run, "scorer")
    try:
        await client.call(calls.SCORER_START, m.ProcessStart(name=scorer_id))
        images = Images(config)
        async with open_pool(config, images) as pool:
            with MetricsWriter(run.root, "scorer", scorer_id) as metrics:
                scorer = Scorer(run, config, scorer_id, client, pool, images, metrics)
                for number in (signal.SIGTERM, signal.SIGINT):
                    asyncio.get_running_loop().add_signal_handler(number, scorer.stop)
                log.info("scorer %s: %d attempts at once", scorer_id, config.scoring.concurrency)
                await scorer.work()
    finally:
        await client.close()
    log.info("scorer %s: stopped", scorer_id)


def main() -> None:
    """``python -m hpcrl.run.scorer --run-dir DIR --index N``: one scorer process of a node."""
    parser = node_arguments("hpcrl.run.scorer")
    role_main("scorer", lambda run, config, args: asyncio.run(_serve(run, config, args.index)), parser)


if __name__ == "__main__":
    main()
