"""The load of the coordinator's bench: workers, scorers and a trainer as asyncio tasks, each with a connection of its own.

48 workers   LEASE n ─► ARTIFACT n ─► SCORES … ─► SEALED n ─► again
15 scorers   LEASE_SCORING n ─► SCORED n ─► again
1 trainer    BATCH of the next version, again and again: PENDING → ACCEPTED → CONSUMED
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m
from hpcrl.protocol.rundir import RunDir

__all__ = ["Load", "Measured", "heartbeats"]

WORKERS = 48
SCORERS = 15
_WARM_ROLLOUTS = _LEAST_ROLLOUTS = 512


@dataclass(slots=True)
class Measured:
    """One period of load. ``leases``: seconds per LEASE call."""

    seconds: float
    rollouts: int
    leases: list[float]
    cpu_s: float

    @property
    def rollouts_per_s(self) -> float:
        return self.rollouts / self.seconds

    @property
    def lease_p99_ms(self) -> float:
        ordered = sorted(self.leases)
        return 1000 * ordered[int(len(ordered) * 0.99)]

    @property
    def cpu_ms_per_rollout(self) -> float:
        return 1000 * self.cpu_s / self.rollouts


class Load:
    """Drives one run directory's coordinator. ``drive`` may be called again; the trainer goes on at the next version."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._step = 0
        self._lineage = 0
        self._stop = self._drained = False
        self._consumed = 0
        self._leases: list[float] = []
        self._period: float | None = None

    async def begin(self, step: int = 0) -> None:
        """A trainer starts at ``step``, and a replica serves its version."""
        inference, trainer = c.AsyncClient(self._run, "inference"), c.AsyncClient(self._run, "trainer")
        await inference.call(c.REGISTER, m.ReplicaRegister(replica_id="r0", base_url="http://r0/v1", node="n"))
        started = await trainer.call(c.START, m.TrainerStart(checkpoint_step=step or None))
        self._lineage, self._step = started.lineage, started.step
        version = f"{self._lineage}.{self._step}"
        await trainer.call(c.PUBLISHED, m.VersionPublished(version=version, digest="d", nbytes=1))
        while not (await inference.call(c.FLIP, m.FlipRequest(replica_id="r0", version=version, wait_s=1))).granted:
            pass
        ready = m.ReplicaReady(replica_id="r0", version=version, digest="d", transfer_s=0, verify_s=0, pause_s=0)
        await inference.call(c.READY, ready)
        await inference.close()
        await trainer.close()

    async def drive(self, seconds: float, size: int, cpu_s: Callable[[], float], rate: float | None = None) -> Measured:
        """Load with calls of ``size`` items for ``seconds`` after the first batches, longer where nothing was consumed by then.

        What is under way at the end is finished.

        ``cpu_s``: CPU seconds of the coordinator so far. ``rate``: rollouts leased per second; None: as fast as answers come.
        """
        self._period = None if rate is None else WORKERS * size / rate
        self._stop = self._drained = False
        workers = [asyncio.create_task(self._worker(index, size)) for index in range(WORKERS)]
        others = [asyncio.create_task(self._scorer(f"s{index}", size)) for index in range(SCORERS)]
        others.append(asyncio.create_task(self._trainer()))
        before = self._consumed
        while self._consumed < before + _WARM_ROLLOUTS:
            await asyncio.sleep(0.05)
        consumed, started, self._leases, cpu = self._consumed, time.monotonic(), [], cpu_s()
        while time.monotonic() < started + seconds or self._consumed < consumed + _LEAST_ROLLOUTS:
            await asyncio.sleep(0.05)
        measured = Measured(time.monotonic() - started, self._consumed - consumed, [*self._leases], cpu_s() - cpu)
        self._stop = True
        await asyncio.gather(*workers)
        self._drained = True
        await asyncio.gather(*others)
        return measured

    async def _worker(self, index: int, size: int) -> None:
        client, worker_id = c.AsyncClient(self._run, "worker"), f"w{index}"
        turn = time.monotonic() + (self._period or 0.0) * index / WORKERS
        while not self._stop:
            if self._period is not None:
                await asyncio.sleep(max(0.0, turn - time.monotonic()))
                turn = max(turn + self._period, time.monotonic())
            started = time.monotonic()
            leases = (await client.call(c.LEASE, m.LeaseRequest(worker_id=worker_id, n=size))).leases
            self._leases.append(time.monotonic() - started)
            waiting = {lease.attempt_id: lease for lease in leases}
            items = [
                m.ArtifactItem(
                    attempt_id=name, artifact=f"artifacts/{name}", digest="d" * 64, environment_version="e" * 64
                )
                for name in waiting
            ]
            await client.call(c.ARTIFACT, m.ArtifactReport(worker_id=worker_id, items=items))
            while waiting:
                request = m.ScoresRequest(worker_id=worker_id, attempt_ids=list(waiting), wait_s=1.0)
                scores = (await client.call(c.SCORES, request)).scores
                done = [waiting.pop(score.attempt_id) for score in scores]
                if done:
                    sealed = [_sealed(lease, row) for row, lease in enumerate(done)]
                    await client.call(c.SEALED, m.SealedReport(worker_id=worker_id, items=sealed))
        await client.close()

    async def _scorer(self, scorer_id: str, size: int) -> None:
        client = c.AsyncClient(self._run, "scorer")
        while not self._drained:
            request = m.ScoringRequest(scorer_id=scorer_id, n=size, wait_s=0.5)
            leases = (await client.call(c.LEASE_SCORING, request)).leases
            items = [
                m.ScoreItem(
                    attempt_id=lease.attempt_id,
                    reward=float(index % 2),
                    rewards={"reward": float(index % 2)},
                    verifier_version="v" * 64,
                    scoring_s=1.0,
                )
                for index, lease in enumerate(leases)
            ]
            if items:
                await client.call(c.SCORED, m.ScoreReport(scorer_id=scorer_id, items=items))
        await client.close()

    async def _trainer(self) -> None:
        client = c.AsyncClient(self._run, "trainer")
        while not self._drained:
            request = m.BatchRequest(version=f"{self._lineage}.{self._step}", wait_s=0.5)
            groups = (await client.call(c.BATCH, request)).groups
            if groups is not None:
                self._consumed += sum(len(group.trajectories) for group in groups)
                self._step += 1
        await client.close()


def _sealed(lease: m.Lease, row: int) -> m.SealedItem:
    return m.SealedItem(
        attempt_id=lease.attempt_id,
        shard=f"shards/{lease.attempt_id}.h5",
        row=row,
        tokens=2000,
        trained_tokens=1000,
        oldest_version=lease.policy_version,
        newest_version=lease.policy_version,
        first_token_at=time.time(),
    )


async def heartbeats(
    run: RunDir,
    cpu_s: Callable[[], float],
    seconds: float,
    *,
    workers: int = 200,
    attempts: int = 50,
    every_s: float = 10.0,
) -> float:
    """Share of one core that the coordinator spends while ``workers`` beat for ``attempts`` running attempts each."""
    client = c.AsyncClient(run, "worker")
    held: dict[str, list[str]] = {}
    for index in range(workers):
        reply = await client.call(c.LEASE, m.LeaseRequest(worker_id=f"hb{index}", n=attempts))
        held[f"hb{index}"] = [lease.attempt_id for lease in reply.leases]

    async def beat(worker_id: str, names: list[str], delay_s: float, until: float) -> None:
        await asyncio.sleep(delay_s)
        while time.monotonic() < until:
            phases = {name: m.Phase(name="tool call", since=time.time()) for name in names}
            beat = m.Heartbeat(worker_id=worker_id, attempt_ids=names, running=names, phases=phases)
            await client.call(c.HEARTBEAT, beat)
            await asyncio.sleep(every_s)

    until, before, started = time.monotonic() + seconds, cpu_s(), time.monotonic()
    spread = (every_s * index / workers for index in range(workers))
    await asyncio.gather(*(beat(*entry, delay, until) for entry, delay in zip(held.items(), spread, strict=True)))
    share = (cpu_s() - before) / (time.monotonic() - started)
    await client.close()
    return share
