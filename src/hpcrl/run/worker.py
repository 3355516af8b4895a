"""A worker: runs the agents of many attempts at once on a sandbox node. Wiring and asyncio loops; ``python -m hpcrl.run.worker``.

    start           WORKER_START: what a dead worker of the same name held is free for others
    lease loop      free slots? ──► LEASE (long poll) ──► one task per attempt
    attempt task    AttemptRunner.run ──► ARTIFACT (batched) ──► frees its slot ──► waits among ``_waiting``
    scores loop     SCORES for all of ``_waiting`` (one long poll) ──► trajectory ──► sealer
    sealer          shard written and sealed ──► SEALED
    heartbeat loop  every heartbeat_s, or soon after attempts began: all attempts alive here; cancelled ones are dropped

An attempt is *alive* from its lease to its SEALED answer; it holds a slot only until its artifact is reported. Waiting attempts are
bounded too (``_WAITING_PER_SLOT``): scoring that falls behind stops leasing, so that nothing ages in a queue.
An attempt fails in one place, ``_attempt``; the loops themselves fail only when the coordinator is gone, and that ends the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from dataclasses import dataclass, field

import aiohttp

from hpcrl.config import RunConfig
from hpcrl.errors import DataError, InfraError
from hpcrl.metrics import MetricsWriter
from hpcrl.protocol import client as calls
from hpcrl.protocol import messages as m
from hpcrl.protocol.rundir import RunDir
from hpcrl.run.attempts import AttemptRunner, Ended, attempt_values
from hpcrl.run.batching import Batcher
from hpcrl.run.ending import cancel_all
from hpcrl.run.role import role_main
from hpcrl.run.sandboxes import Images, node_arguments, open_pool, process_name
from hpcrl.run.sealer import Sealer
from hpcrl.trajectory import ShardWriter, from_record

__all__ = ["Worker", "main"]

log = logging.getLogger(__name__)

_POLL_S = 10.0
_SCORES_POLL_S = 0.5
"""A poll does not know of attempts that begin to wait after it was sent; this bounds how long they are not asked for."""
_COALESCE_S = 0.01
"""After a slot frees, others follow: one LEASE for several."""
_RUNNING_S = 0.25
"""New attempts are told to be running this soon."""
_WAITING_PER_SLOT = 8
_LAST_WORD_S = 2.0


@dataclass(slots=True)
class _Live:
    """An attempt between its lease and the end of its life here."""

    lease: m.Lease
    task: asyncio.Task[None] | None = None
    ended: Ended | None = None
    phase: m.Phase | None = None
    reported_at: float = 0.0
    scored_at: float = 0.0


@dataclass(slots=True)
class _Signals:
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    slots: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    started: asyncio.Event = field(default_factory=asyncio.Event)


class Worker:
    """See the module's docstring. ``runner`` runs single attempts, ``client`` is the coordinator's."""

    def __init__(
        self,
        run: RunDir,
        config: RunConfig,
        worker_id: str,
        client: calls.AsyncClient,
        runner: AttemptRunner,
        metrics: MetricsWriter,
    ) -> None:
        self._run = run
        self._config = config
        self._id = worker_id
        self._client = client
        self._runner = runner
        self._metrics = metrics
        self._live: dict[str, _Live] = {}
        self._waiting: dict[str, _Live] = {}
        self._running = 0
        self._sealed_total = 0
        self._unannounced: set[str] = set()
        self._signals = _Signals()
        self._error: BaseException | None = None
        self._leaving = False
        self._artifacts: Batcher[m.ArtifactItem] = Batcher(self._send_artifacts, lambda item: item.attempt_id)
        self._failures: Batcher[m.FailureItem] = Batcher(self._send_failures, lambda item: item.attempt_id)
        self._sealer = Sealer(
            run.root,
            ShardWriter(run.shards, worker_id),
            self._sealed,
            seal_every=config.worker.seal_every,
            seal_after_s=config.worker.seal_after_s,
            alive=lambda: len(self._live),
        )

    def stop(self) -> None:
        """End soon: attempts are dropped (their leases expire or are cancelled by the coordinator)."""
        self._signals.stop.set()

    def leave(self) -> None:
        """End soon while the run goes on: attempts are given back, so that others have them at once."""
        self._leaving = True
        self.stop()

    async def work(self) -> None:
        """Work until the coordinator says stop or :meth:`stop`. Raises CoordinatorGone, or whatever broke a loop."""
        loops = [
            asyncio.create_task(loop, name=name)
            for name, loop in (
                ("lease", self._lease_loop()),
                ("heartbeat", self._heartbeat_loop()),
                ("scores", self._scores_loop()),
                ("sealer", self._sealer.run()),
                ("stop", self._signals.stop.wait()),
            )
        ]
        done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
        attempts = [live.task for live in self._live.values() if live.task is not None]
        await cancel_all(loops)
        if self._leaving:
            await self._give_back()
        await cancel_all(attempts)
        for task in done:
            task.result()
        if self._error is not None:
            raise self._error

    # ---------------------------------------------------------------- loops

    async def _lease_loop(self) -> None:
        slots = self._config.worker.concurrency
        while True:
            free = min(slots - self._running, slots * _WAITING_PER_SLOT - len(self._live))
            if free <= 0:
                self._signals.slots.clear()
                await self._signals.slots.wait()
                await asyncio.sleep(_COALESCE_S)
                continue
            reply = await self._client.call(calls.LEASE, m.LeaseRequest(worker_id=self._id, n=free, wait_s=_POLL_S))
            for lease in reply.leases:
                self._begin(lease)
            if reply.stop:
                self.stop()
                return

    def _begin(self, lease: m.Lease) -> None:
        live = self._live[lease.attempt_id] = _Live(lease)
        self._running += 1
        self._unannounced.add(lease.attempt_id)
        self._signals.started.set()
        live.task = asyncio.create_task(self._attempt(live), name=lease.attempt_id)
        live.task.add_done_callback(self._attempt_done)

    def _attempt_done(self, task: asyncio.Task[None]) -> None:
        """A failing *report* ends the worker: nothing it does would be heard any more."""
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
            self.stop()

    async def _heartbeat_loop(self) -> None:
        while True:
            # Not wait_for(): before Python 3.12 it may swallow a cancellation that meets the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.coordinator.heartbeat_s):
                    await self._signals.started.wait()
                    await asyncio.sleep(_RUNNING_S)
            self._signals.started.clear()
            running, self._unannounced = sorted(self._unannounced & self._live.keys()), set()
            phases = {
                name: live.phase for name, live in self._live.items() if live.phase is not None and live.ended is None
            }
            beat = m.Heartbeat(worker_id=self._id, attempt_ids=sorted(self._live), running=running, phases=phases)
            reply = await self._client.call(calls.HEARTBEAT, beat)
            for attempt_id, reason in reply.cancelled.items():
                self._drop(attempt_id, reason)
            if reply.stop:
                self.stop()
                return

    async def _scores_loop(self) -> None:
        while True:
            if not self._waiting:
                self._signals.waiting.clear()
                await self._signals.waiting.wait()
            request = m.ScoresRequest(worker_id=self._id, attempt_ids=sorted(self._waiting), wait_s=_SCORES_POLL_S)
            reply = await self._client.call(calls.SCORES, request)
            for attempt_id, reason in reply.cancelled.items():
                self._drop(attempt_id, reason)
            for score in reply.scores:
                live = self._waiting.pop(score.attempt_id, None)
                if live is not None:
                    await self._scored(live, score)

    # ---------------------------------------------------------------- one attempt

    async def _attempt(self, live: _Live) -> None:
        """The agent's part of an attempt; the one place where its failure is recorded, as data."""
        lease = live.lease

        def phase(name: str) -> None:
            live.phase = m.Phase(name=name, since=time.time())

        try:
            try:
                ended = await self._runner.run(lease, phase)
            except (InfraError, DataError) as error:
                await self._failed(lease, error)
                return
            except Exception as error:  # the one recording point: a bug here costs one attempt, not the worker
                log.exception("attempt %s", lease.attempt_id)
                await self._failed(lease, InfraError("worker_bug", f"{type(error).__name__}: {error}"))
                return
            refused = await self._artifacts.put(ended.artifact)
            if refused is not None:
                self._rejected(lease.attempt_id, refused)
                return
            live.ended, live.reported_at = ended, time.monotonic()
            self._waiting[lease.attempt_id] = live
            self._signals.waiting.set()
        finally:
            self._running -= 1
            if live.ended is None:
                self._forget(lease.attempt_id)
            self._signals.slots.set()

    async def _scored(self, live: _Live, score: m.ScoredAttempt) -> None:
        ended = live.ended
        if ended is None:
            return
        live.scored_at = time.monotonic()
        ended.timings["score_wait"] = live.scored_at - live.reported_at
        try:
            trajectory = from_record(
                live.lease,
                ended.record,
                score,
                run_id=self._run.run_id,
                environment_version=ended.artifact.environment_version,
                policy_failure=score.policy_failure,
                timings=ended.timings,
            )
        except DataError as error:
            await self._failed(live.lease, error)
            self._forget(live.lease.attempt_id)
            return
        self._sealer.add(trajectory)

    async def _failed(self, lease: m.Lease, error: InfraError | DataError) -> None:
        log.warning("attempt %s: %s failure: %s", lease.attempt_id, error.kind, error)
        kind: m.FailureKind = "data" if isinstance(error, DataError) else "infra"
        item = m.FailureItem(attempt_id=lease.attempt_id, kind=kind, reason=error.reason, message=str(error)[:2000])
        refused = await self._failures.put(item)
        if refused is not None:
            self._rejected(lease.attempt_id, refused)
        else:
            self._metrics.write({"failures": {f"{kind}:{error.reason}": 1}})

    def _drop(self, attempt_id: str, reason: str) -> None:
        """The coordinator no longer wants it: stop what runs, forget what waits."""
        live = self._live.get(attempt_id)
        if live is None:
            return
        log.info("attempt %s dropped: %s", attempt_id, reason)
        if live.task is not None and live.task is not asyncio.current_task() and not live.task.done():
            live.task.cancel()
        self._forget(attempt_id)

    def _forget(self, attempt_id: str) -> None:
        self._live.pop(attempt_id, None)
        self._waiting.pop(attempt_id, None)
        self._signals.slots.set()

    async def _give_back(self) -> None:
        """Said once, before Slurm kills us; without an answer the leases run out."""
        items = [m.FailureItem(attempt_id=name, kind="infra", reason=m.WORKER_LEFT) for name in self._live]
        with contextlib.suppress(TimeoutError, InfraError):
            async with asyncio.timeout(_LAST_WORD_S):
                await self._send_failures(items)

    # ---------------------------------------------------------------- batched reports

    async def _send_artifacts(self, items: list[m.ArtifactItem]) -> m.Ack:
        return await self._client.call(calls.ARTIFACT, m.ArtifactReport(worker_id=self._id, items=items))

    async def _send_failures(self, items: list[m.FailureItem]) -> m.Ack:
        return await self._client.call(calls.FAILED, m.FailureReport(reporter_id=self._id, items=items))

    async def _sealed(self, items: list[m.SealedItem], seal_s: float) -> None:
        ack = await self._client.call(calls.SEALED, m.SealedReport(worker_id=self._id, items=items))
        self._sealed_total += len(ack.accepted)
        self._metrics.write({"seal_s": seal_s, "trajectories_sealed": self._sealed_total})
        for item in items:
            reason = ack.rejected.get(item.attempt_id)
            live = self._live.get(item.attempt_id)
            if reason is not None:
                self._rejected(item.attempt_id, reason)
            elif live is not None and live.ended is not None:
                waited = time.monotonic() - live.scored_at
                self._metrics.write({**attempt_values(live.ended, item, waited), **self._runner.pool_values()})
            self._forget(item.attempt_id)

    def _rejected(self, attempt_id: str, reason: str) -> None:
        log.info("attempt %s: report came too late: %s", attempt_id, reason)
        self._metrics.write({"reports_rejected": {reason: 1}})


async def _serve(run: RunDir, config: RunConfig, index: int, job: str | None) -> None:
    worker_id = process_name(index, job)
    client = calls.AsyncClient(run, "worker")
    try:
        # Before anything slow: others may take at once what a dead worker of this name held.
        await client.call(calls.WORKER_START, m.ProcessStart(name=worker_id))
        images = Images(config)
        async with (
            open_pool(config, images) as pool,
            # No cap on connections: concurrency is the cap, and one attempt's call must not wait for another's.
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        ):
            with MetricsWriter(run.root, "worker", worker_id) as metrics:
                runner = AttemptRunner(run, config, session, pool, images)
                worker = Worker(run, config, worker_id, client, runner, metrics)
                for number in (signal.SIGTERM, signal.SIGINT):
                    asyncio.get_running_loop().add_signal_handler(number, worker.leave)
                log.info("worker %s: %d attempts at once", worker_id, config.worker.concurrency)
                await worker.work()
    finally:
        await client.close()
    log.info("worker %s: stopped", worker_id)


def main() -> None:
    """``python -m hpcrl.run.worker --run-dir DIR --index N``: one worker process of a node."""
    parser = node_arguments("hpcrl.run.worker")
    role_main("worker", lambda run, config, args: asyncio.run(_serve(run, config, args.index, args.job)), parser)


if __name__ == "__main__":
    main()
