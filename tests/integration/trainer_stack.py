"""Surroundings of a trainer in tests: the real coordinator process, a replica that keeps each version, a worker that makes
up attempts and seals real shards.

Rollouts are made up, but their logprobs are those of the very version a replica serves, so that a wrong version anywhere between
lease, span, shard and step shows as a logprob gap.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "trainer"))

import samples

from hpcrl.config import RunConfig, dump_config, parse_config
from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m
from hpcrl.protocol.keyfiles import issue_keys
from hpcrl.protocol.record import AttemptRecord, RequestRecord, VersionSpan
from hpcrl.protocol.rundir import RunDir, publish_text
from hpcrl.protocol.version import PolicyVersion
from hpcrl.trainer.distributed import Ranks
from hpcrl.trainer.feed import Coordinator
from hpcrl.trainer.loop import Trainer
from hpcrl.trainer.model import Policy
from hpcrl.trajectory import ShardWriter, from_record

__all__ = ["FailingWorker", "Replica", "Worker", "running", "train"]

REPLICA = "inf0"
ALONE = Ranks(0, 1, torch.device("cpu"))


class Replica:
    """Publishes in the background as the real publisher does, flips and reports READY; keeps a copy of each version."""

    def __init__(self, run: RunDir, policy: Policy, delay_s: float) -> None:
        self._client = c.Client(run, "admin")
        self._policy = policy
        self._delay_s = delay_s
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        self.versions: dict[str, Policy] = {}
        self._client.call(c.REGISTER, m.ReplicaRegister(replica_id=REPLICA, base_url="http://none/v1", node="n"))

    def publish(self, version: PolicyVersion) -> None:
        if self._pending is not None:
            self._pending.result()
        self.versions[str(version)] = copy.deepcopy(self._policy)
        self._pending = self._thread.submit(self._send, str(version))

    def check(self) -> None:
        if self._pending is not None and self._pending.done():
            self._pending.result()

    def _send(self, version: str) -> None:
        time.sleep(self._delay_s)
        self._client.call(c.PUBLISHED, m.VersionPublished(version=version, digest="d", nbytes=1))
        flip = m.FlipRequest(replica_id=REPLICA, version=version, wait_s=1.0)
        while not self._client.call(c.FLIP, flip).granted:
            pass
        ready = {"replica_id": REPLICA, "version": version, "digest": "d"}
        self._client.call(c.READY, m.ReplicaReady(**ready, transfer_s=0.0, verify_s=0.0, pause_s=0.0))

    def close(self) -> None:
        if self._pending is not None:
            self._pending.result()
        self._thread.shutdown()
        self._client.close()


class Worker(threading.Thread):
    """Leases, makes up an attempt with the bound version's logprobs, scores it, seals it."""

    def __init__(self, run: RunDir, replica: Replica) -> None:
        super().__init__(daemon=True)
        self._run = run
        self._replica = replica
        self._client = c.Client(run, "admin")
        self._shards = ShardWriter(run.shards, f"w{time.monotonic_ns()}")
        self._done = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._done.is_set():
                reply = self._client.call(c.LEASE, m.LeaseRequest(worker_id="w", n=4, wait_s=0.2))
                if reply.leases:
                    self._work(reply.leases)
        except BaseException as error:
            self.error = error
            raise

    def stop(self) -> None:
        self._done.set()
        self.join()
        self._client.close()

    def _work(self, leases: list[m.Lease]) -> None:
        ids = [lease.attempt_id for lease in leases]
        self._client.call(c.HEARTBEAT, m.Heartbeat(worker_id="w", attempt_ids=ids, running=ids))
        records = {lease.attempt_id: self._record(lease) for lease in leases}
        items = [m.ArtifactItem(attempt_id=i, artifact="a", digest="d", environment_version="e") for i in ids]
        accepted = self._client.call(c.ARTIFACT, m.ArtifactReport(worker_id="w", items=items)).accepted
        scored = {lease.attempt_id: self._score(lease, records[lease.attempt_id]) for lease in leases}
        waiting = set(accepted)
        while waiting:
            got = self._client.call(c.LEASE_SCORING, m.ScoringRequest(scorer_id="s", n=8, wait_s=0.2)).leases
            waiting -= {lease.attempt_id for lease in got}
            lost = m.ScoresRequest(worker_id="w", attempt_ids=sorted(waiting), wait_s=0.0)
            waiting -= self._client.call(c.SCORES, lost).cancelled.keys()
            scores = [
                m.ScoreItem(**scored[lease.attempt_id].model_dump()) for lease in got if lease.attempt_id in scored
            ]
            self._client.call(c.SCORED, m.ScoreReport(scorer_id="s", items=scores))
        rows, sealed = [], []
        for lease in leases:
            made = from_record(
                lease, records[lease.attempt_id], scored[lease.attempt_id], run_id="r", environment_version="e"
            )
            rows.append((made, self._shards.append(made)))
        path, _ = self._shards.seal()
        for made, row in rows:
            sealed.append(
                m.SealedItem(
                    attempt_id=made.attempt_id,
                    shard=f"shards/{path.name}",
                    row=row,
                    tokens=made.tokens,
                    trained_tokens=made.trained_tokens,
                    oldest_version=str(made.oldest_version),
                    newest_version=str(made.newest_version),
                    first_token_at=made.first_token_at,
                )
            )
        self._client.call(c.SEALED, m.SealedReport(worker_id="w", items=sealed))

    def _record(self, lease: m.Lease) -> AttemptRecord:
        seed = int.from_bytes(lease.attempt_id.encode()[-6:], "big") % 10_000
        made = samples.record_logprobs(self._replica.versions[lease.policy_version], samples.trajectory(seed))
        edges = np.flatnonzero(np.diff(np.concatenate([[0], made.loss_mask, [0]]).astype(int))).reshape(-1, 2).tolist()
        shared: dict[str, Any] = {"segment": 0, "prompt_tokens": 1, "ending": "stop", "sampling": lease.sampling}
        times = {"started_at": time.time(), "queue_s": 0.0, "generate_s": 0.0}
        return AttemptRecord(
            attempt_id=lease.attempt_id,
            token_ids=made.token_ids.tolist(),
            logprobs=made.logprobs.tolist(),
            loss_mask=made.loss_mask.tolist(),
            segments=[0],
            version_spans=[VersionSpan(start=a, end=b, version=lease.policy_version) for a, b in edges],
            requests=[RequestRecord(request_id=f"q{a}", start=a, end=b, **shared, **times) for a, b in edges],
            messages=[],
        )

    def _score(self, lease: m.Lease, record: AttemptRecord) -> m.ScoredAttempt:
        reward = float(lease.rollout_id[-1] in "02")
        return m.ScoredAttempt(
            attempt_id=lease.attempt_id, reward=reward, rewards={}, verifier_version="v", scoring_s=0
        )


class FailingWorker(Worker):
    """No sandbox ever starts."""

    def _work(self, leases: list[m.Lease]) -> None:
        items = [
            m.FailureItem(
                attempt_id=lease.attempt_id, kind="infra", reason="sandbox_start", message="no user namespaces"
            )
            for lease in leases
        ]
        self._client.call(c.FAILED, m.FailureReport(reporter_id="w", items=items))


@contextmanager
def running(
    tmp_path: Path, *, staleness: dict[str, Any] | None = None, coordinator: dict[str, Any] | None = None
) -> Iterator[RunDir]:
    """A run directory of six steps of two groups of four, and its coordinator."""
    for name in ("train/a", "train/b", "eval/x"):
        (tmp_path / "tasks" / name).mkdir(parents=True)
    model = samples.save_model(tmp_path / "model")
    config = parse_config(
        {
            "model": {"path": str(model)},
            "tasks": {"train": str(tmp_path / "tasks/train"), "eval": str(tmp_path / "tasks/eval")},
            "rollout": {"group_size": 4, "temperature": 0.8},
            "staleness": {"max_policy_lag": 2, **(staleness or {})},
            "trainer": {
                "ranks": 1,
                "steps": 6,
                "groups_per_step": 2,
                "minibatches": 2,
                "checkpoint_every": 2,
                "keep_checkpoints": 9,
                "optimizer": {"lr": 1e-3},
            },
            "eval": {"samples": 2, "every": 3},
            "inference": {"replicas": 1},
            "coordinator": {"lease_s": 600.0, "data_retries": 50, "redraws": 50, **(coordinator or {})},
        }
    )
    run = RunDir(tmp_path / "run")
    run.create()
    publish_text(run.config, dump_config(config))
    issue_keys(run)
    command = [sys.executable, "-m", "hpcrl.run.coordinator", "--run-dir", str(run.root), "--host", "127.0.0.1"]
    with open(run.root / "coordinator.log", "wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            c.wait_for_endpoint(run, "coordinator", 120.0, lambda: process.poll() is None)
            yield run
        finally:
            process.terminate()


def train(
    run: RunDir,
    config: RunConfig,
    delay_s: float,
    between: Callable[[Coordinator], Coordinator] = lambda client: client,
    worker_type: type[Worker] = Worker,
) -> dict[str, Any]:
    """The trainer's whole run. ``between``: what stands between it and its client."""
    client = c.Client(run, "trainer")
    trainer = Trainer(config, run, ALONE, between(client))
    replica = Replica(run, trainer.policy, delay_s)
    worker = worker_type(run, replica)
    worker.start()
    try:
        return trainer.run(replica)
    finally:
        worker.stop()
        replica.close()
        client.close()
        assert worker.error is None
