"""The real coordinator process over HTTP: a whole small run, kill -9 in the middle of it, keys and errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import httpx
import pytest

from hpcrl.config import dump_config, parse_config
from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m
from hpcrl.protocol.keyfiles import issue_keys, read_keys
from hpcrl.protocol.keys import Role, read_attempt_key
from hpcrl.protocol.rundir import RunDir, publish_text
from hpcrl.protocol.states import State
from hpcrl.protocol.status import Status, StatusRequest


class Coordinator:
    """The process of one run directory, started and stopped at will."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.process: subprocess.Popen[bytes] | None = None
        self.log = run.root / "coordinator.log"

    def start(self, *arguments: str) -> None:
        (self.run.endpoints / "coordinator").unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "hpcrl.run.coordinator",
            "--run-dir",
            str(self.run.root),
            "--host",
            "127.0.0.1",
        ]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([*command, *arguments], stdout=log, stderr=log)
        process = self.process
        c.wait_for_endpoint(self.run, "coordinator", 30.0, lambda: process.poll() is None)

    def end(self, number: int) -> int:
        if self.process is None:
            raise RuntimeError("not started")
        self.process.send_signal(number)
        return self.process.wait(timeout=20)

    @property
    def url(self) -> str:
        url = self.run.endpoint("coordinator")
        if url is None:
            raise RuntimeError("not announced")
        return url


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    for split, names in (("train", ("a", "b", "c")), ("eval", ("x",))):
        for name in names:
            (tmp_path / "tasks" / split / name).mkdir(parents=True)
    config = parse_config(
        {
            "model": {"path": "model"},
            "tasks": {"train": str(tmp_path / "tasks/train"), "eval": str(tmp_path / "tasks/eval")},
            "rollout": {"group_size": 2},
            "trainer": {"steps": 4, "groups_per_step": 2},
            "inference": {"replicas": 1},
            "coordinator": {"lease_s": 20.0},
        }
    )
    run = RunDir(tmp_path / "run-1")
    run.create()
    issue_keys(run)
    publish_text(run.config, dump_config(config))
    process = Coordinator(run)
    process.start()
    yield process
    if process.process is not None and process.process.poll() is None:
        process.end(signal.SIGKILL)


class Roles:
    """One client per role, and the steps of a run."""

    def __init__(self, run: RunDir) -> None:
        self.worker, self.scorer = c.Client(run, "worker"), c.Client(run, "scorer")
        self.trainer, self.inference, self.admin = (
            c.Client(run, "trainer"),
            c.Client(run, "inference"),
            c.Client(run, "admin"),
        )

    def publish(self, version: str) -> None:
        self.trainer.call(c.PUBLISHED, m.VersionPublished(version=version, digest="d", nbytes=1))
        assert self.inference.call(c.FLIP, m.FlipRequest(replica_id="r0", version=version)).granted
        timings = {"transfer_s": 0.1, "verify_s": 0.1, "pause_s": 0.1}
        self.inference.call(c.READY, m.ReplicaReady(replica_id="r0", version=version, digest="d", **timings))

    def begin(self, lineage: int = 0) -> None:
        self.inference.call(c.REGISTER, m.ReplicaRegister(replica_id="r0", base_url="http://r0/v1", node="n"))
        assert self.trainer.call(c.START, m.TrainerStart()) == m.TrainerStarted(lineage=lineage, step=0)
        self.publish(f"{lineage}.0")

    def lease(self, n: int) -> list[m.Lease]:
        return self.worker.call(c.LEASE, m.LeaseRequest(worker_id="w", n=n)).leases

    def artifact(self, leases: list[m.Lease]) -> m.Ack:
        items = [
            m.ArtifactItem(attempt_id=lease.attempt_id, artifact="a", digest="d", environment_version="e")
            for lease in leases
        ]
        return self.worker.call(c.ARTIFACT, m.ArtifactReport(worker_id="w", items=items))

    def score(self, n: int) -> None:
        reply = self.scorer.call(c.LEASE_SCORING, m.ScoringRequest(scorer_id="s", n=n))
        items = [
            m.ScoreItem(attempt_id=lease.attempt_id, reward=0.5, rewards={}, verifier_version="v", scoring_s=0.1)
            for lease in reply.leases
        ]
        assert not self.scorer.call(c.SCORED, m.ScoreReport(scorer_id="s", items=items)).rejected

    def seal(self, leases: list[m.Lease]) -> m.Ack:
        items = [
            m.SealedItem(
                attempt_id=lease.attempt_id,
                shard="shards/w.h5",
                row=row,
                tokens=10,
                trained_tokens=5,
                oldest_version=lease.policy_version,
                newest_version=lease.policy_version,
                first_token_at=time.time(),
            )
            for row, lease in enumerate(leases)
        ]
        return self.worker.call(c.SEALED, m.SealedReport(worker_id="w", items=items))

    def batch(self, version: str, wait_s: float = 10.0) -> m.Batch:
        return self.trainer.call(c.BATCH, m.BatchRequest(version=version, wait_s=wait_s))

    def status(self) -> Status:
        return self.admin.call(c.STATUS, StatusRequest())


def test_a_run_survives_kill_9_at_every_stage(coordinator: Coordinator) -> None:
    roles = Roles(coordinator.run)

    def crash() -> None:
        before = roles.status().model_copy(update={"waits": []})
        assert coordinator.end(signal.SIGKILL) == -signal.SIGKILL
        coordinator.start()
        assert roles.status().model_copy(update={"waits": []}) == before

    roles.begin()
    crash()
    leases = roles.lease(10)
    assert len(leases) == 4
    assert {lease.policy_version for lease in leases} == {"0.0"}
    crash()
    key = read_attempt_key(read_keys(coordinator.run, "inference").proxies, leases[0].api_key)
    assert key == (leases[0].attempt_id, "0.0", "r0", "trajectory")
    assert len(roles.artifact(leases).accepted) == 4
    crash()
    roles.score(10)
    crash()
    scores = roles.worker.call(c.SCORES, m.ScoresRequest(worker_id="w", attempt_ids=[a.attempt_id for a in leases]))
    assert [score.reward for score in scores.scores] == [0.5] * 4
    assert len(roles.seal(leases).accepted) == 4
    crash()
    batch = roles.batch("0.0")
    assert batch.groups is not None and len(batch.groups) == 2
    crash()
    assert roles.batch("0.0") == batch
    status = roles.status()
    assert (status.consumed, status.duplicates, status.step) == (4, 0, 1)
    assert coordinator.end(signal.SIGTERM) == 0


def test_a_repeated_call_gets_the_first_answer_across_a_crash(coordinator: Coordinator) -> None:
    run, roles = coordinator.run, Roles(coordinator.run)
    roles.begin()
    headers = {"Authorization": f"Bearer {read_keys(run, 'worker').coordinator}", "Idempotency-Key": "k1"}
    body = m.LeaseRequest(worker_id="w", n=3).model_dump_json()
    first = httpx.post(coordinator.url + c.LEASE.path, content=body, headers=headers)
    assert len(first.json()["leases"]) == 3
    coordinator.end(signal.SIGKILL)
    coordinator.start()
    again = httpx.post(coordinator.url + c.LEASE.path, content=body, headers=headers)
    assert again.content == first.content
    assert roles.status().attempts == {State.LEASED: 3}


def test_long_polls_wake_and_clients_wait_through_a_restart(coordinator: Coordinator) -> None:
    roles = Roles(coordinator.run)
    roles.begin()
    leases = roles.lease(4)
    taken: list[m.Batch] = []
    waiting = threading.Thread(target=lambda: taken.append(roles.batch("0.0", wait_s=25.0)))
    waiting.start()
    coordinator.end(signal.SIGTERM)
    coordinator.start()
    roles.artifact(leases)
    roles.score(4)
    sealed_at = time.monotonic()
    roles.seal(leases)
    waiting.join(timeout=20)
    assert taken and taken[0].groups is not None
    assert time.monotonic() - sealed_at < 3.0


def test_finish_stops_workers_and_resume_goes_on(coordinator: Coordinator) -> None:
    roles = Roles(coordinator.run)
    roles.begin()
    assert len(roles.lease(2)) == 2
    roles.admin.call(c.FINISH, m.Finish(reason="time limit"))
    assert roles.worker.call(c.LEASE, m.LeaseRequest(worker_id="w", n=1)).stop
    status = roles.status()
    assert status.stopped and status.cancelled == {"shutdown": 2}
    coordinator.end(signal.SIGKILL)
    coordinator.start()
    assert roles.status().stopped
    coordinator.end(signal.SIGTERM)
    coordinator.start("--resume")
    assert not roles.status().stopped
    roles.begin(lineage=1)  # nothing is leased to the replicas of the earlier life
    assert len(roles.lease(2)) == 2


def test_errors_are_one_clear_line(coordinator: Coordinator) -> None:
    run, url = coordinator.run, coordinator.url

    def post(path: str, content: str, key: str | None) -> httpx.Response:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.post(url + path, content=content, headers=headers)

    worker, admin = read_keys(run, "worker").coordinator, read_keys(run, "admin").coordinator
    assert httpx.get(url + "/health").status_code == 200
    assert post(c.STATUS.path, "{}", None).status_code == 401
    assert post(c.STATUS.path, "{}", "guess").status_code == 401
    wrong_role = post(c.STATUS.path, "{}", worker)
    assert wrong_role.status_code == 403 and "admin" in wrong_role.json()["error"]
    assert post(c.STATUS.path, "{}", admin).status_code == 200
    unknown_field = post(c.LEASE.path, '{"worker_id": "w", "n": 1, "m": 2}', admin)
    assert unknown_field.status_code == 422 and unknown_field.json()["error"].startswith("m:")
    assert post(c.LEASE.path, "x" * (9 * 1024 * 1024), worker).status_code == 413
    assert post(c.BATCH.path, '{"version": "one"}', admin).status_code == 422
    conflict = post(c.BATCH.path, '{"version": "3.4"}', admin)
    assert conflict.status_code == 409 and "lineage" in conflict.json()["error"]


def test_every_call_is_its_roles_alone(coordinator: Coordinator) -> None:
    """Above all: a worker cannot score, and nobody but the trainer decides what is trained."""
    keys = {role: read_keys(coordinator.run, role).coordinator for role in get_args(Role)}
    with httpx.Client(base_url=coordinator.url, trust_env=False) as http:
        for endpoint in c.ENDPOINTS:
            for role, key in keys.items():
                headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": "k"}
                status = http.post(endpoint.path, content="no JSON", headers=headers).status_code
                assert status == (422 if role in (endpoint.role, "admin") else 403), (endpoint.path, role)
        for stolen in (coordinator.run.secret(), read_keys(coordinator.run, "inference").proxies):
            assert http.post(c.STATUS.path, headers={"Authorization": f"Bearer {stolen}"}).status_code == 401


def test_a_second_coordinator_is_refused(coordinator: Coordinator) -> None:
    command = [sys.executable, "-m", "hpcrl.run.coordinator", "--run-dir", str(coordinator.run.root)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert second.returncode == 3
    assert "another coordinator" in second.stderr
    assert Roles(coordinator.run).status().step == 0
