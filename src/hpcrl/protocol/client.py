"""The coordinator's calls as one table, and the two clients that make them.

An ``Endpoint`` says path, role, request and reply; the server registers its routes from the same table, so that both sides agree by
construction. Clients retry while the coordinator is away (connection errors, 502/503), with backoff and jitter, under one
idempotency key, until ``patience_s`` is over: a restart of the coordinator is invisible to the roles.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import aiohttp
import httpx

from hpcrl.errors import InfraError
from hpcrl.protocol import messages as m
from hpcrl.protocol.history import HistoryRequest, RolloutHistory
from hpcrl.protocol.keyfiles import read_keys
from hpcrl.protocol.keys import Role
from hpcrl.protocol.rundir import RunDir
from hpcrl.protocol.status import Status, StatusRequest

__all__ = ["ENDPOINTS", "AsyncClient", "Client", "CoordinatorGone", "Endpoint", "wait_for_endpoint"]

Req = TypeVar("Req", bound=m.Message)
Rep = TypeVar("Rep", bound=m.Message)


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[Req, Rep]):
    """One call: ``POST path`` with a JSON body of type ``request``, answered by ``reply``; ``mutates`` calls are idempotent by key."""

    path: str
    role: Role
    request: type[Req]
    reply: type[Rep]
    mutates: bool = True


WORKER_START = Endpoint("/v1/worker/start", "worker", m.ProcessStart, m.Empty)
LEASE = Endpoint("/v1/worker/lease", "worker", m.LeaseRequest, m.LeaseReply)
HEARTBEAT = Endpoint("/v1/worker/heartbeat", "worker", m.Heartbeat, m.HeartbeatReply, mutates=False)
ARTIFACT = Endpoint("/v1/worker/artifact", "worker", m.ArtifactReport, m.Ack)
FAILED = Endpoint("/v1/worker/failed", "worker", m.FailureReport, m.Ack)
SCORES = Endpoint("/v1/worker/scores", "worker", m.ScoresRequest, m.ScoresReply, mutates=False)
SEALED = Endpoint("/v1/worker/sealed", "worker", m.SealedReport, m.Ack)

SCORER_START = Endpoint("/v1/scorer/start", "scorer", m.ProcessStart, m.Empty)
LEASE_SCORING = Endpoint("/v1/scorer/lease", "scorer", m.ScoringRequest, m.ScoringReply)
SCORED = Endpoint("/v1/scorer/scored", "scorer", m.ScoreReport, m.Ack)
SCORING_FAILED = Endpoint("/v1/scorer/failed", "scorer", m.FailureReport, m.Ack)

REGISTER = Endpoint("/v1/inference/register", "inference", m.ReplicaRegister, m.Empty)
FLIP = Endpoint("/v1/inference/flip", "inference", m.FlipRequest, m.FlipGrant, mutates=False)
LOAD = Endpoint("/v1/inference/load", "inference", m.ReplicaLoad, m.Empty, mutates=False)
ENDED = Endpoint("/v1/inference/ended", "inference", m.EndedRequest, m.EndedReply, mutates=False)
READY = Endpoint("/v1/inference/ready", "inference", m.ReplicaReady, m.Empty)
REFUSED = Endpoint("/v1/inference/refused", "inference", m.ReplicaRefused, m.Empty)

START = Endpoint("/v1/trainer/start", "trainer", m.TrainerStart, m.TrainerStarted)
PUBLISHED = Endpoint("/v1/trainer/published", "trainer", m.VersionPublished, m.Empty)
BATCH = Endpoint("/v1/trainer/batch", "trainer", m.BatchRequest, m.Batch, mutates=False)
BAD_SHARD = Endpoint("/v1/trainer/bad_shard", "trainer", m.BadShard, m.Empty)
OFF_POLICY = Endpoint("/v1/trainer/off_policy", "trainer", m.OffPolicy, m.Empty)
CHECKPOINTED = Endpoint("/v1/trainer/checkpointed", "trainer", m.CheckpointDone, m.Empty)
EVAL = Endpoint("/v1/trainer/eval", "trainer", m.EvalRequest, m.Empty)
EVAL_STATUS = Endpoint("/v1/trainer/eval_status", "trainer", m.EvalStatusRequest, m.EvalResult, mutates=False)

FINISH = Endpoint("/v1/admin/finish", "admin", m.Finish, m.Empty)
STATUS = Endpoint("/v1/admin/status", "admin", StatusRequest, Status, mutates=False)
HISTORY = Endpoint("/v1/admin/history", "admin", HistoryRequest, RolloutHistory, mutates=False)

ENDPOINTS: tuple[Endpoint, ...] = (
    WORKER_START,
    LEASE,
    HEARTBEAT,
    ARTIFACT,
    FAILED,
    SCORES,
    SEALED,
    SCORER_START,
    LEASE_SCORING,
    SCORED,
    SCORING_FAILED,
    REGISTER,
    FLIP,
    LOAD,
    ENDED,
    READY,
    REFUSED,
    START,
    PUBLISHED,
    BATCH,
    BAD_SHARD,
    OFF_POLICY,
    CHECKPOINTED,
    EVAL,
    EVAL_STATUS,
    FINISH,
    STATUS,
    HISTORY,
)
"""All calls. ``admin`` is the launcher and the CLI. The batch call is repeatable by its version, heartbeats by nature."""


class CoordinatorGone(InfraError):
    """No answer from the coordinator for longer than the client's patience."""


class _NotAnnounced(Exception):
    """The coordinator's URL is not in the run directory (yet)."""


_RETRY_STATUS = frozenset({502, 503})
_HTTP_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
_BACKOFF_CAP_S = 2.0


class _Base:
    """What both clients share: where the coordinator is (read again after each failure: it may have moved), and the headers."""

    def __init__(self, run: RunDir, role: Role, patience_s: float = 60.0) -> None:
        self._run = run
        self._role = role
        self._patience_s = patience_s
        self._key = read_keys(run, role).coordinator
        self._base: str | None = None

    def _url(self, endpoint: Endpoint[Req, Rep]) -> str:
        if self._base is None:
            self._base = self._run.endpoint("coordinator")
        if self._base is None:
            raise _NotAnnounced("the coordinator has not announced itself yet")
        return self._base + endpoint.path

    def _headers(self, idempotency_key: str) -> dict[str, str]:
        return {
            "Authorization": f"Bearer {self._key}",
            "Idempotency-Key": idempotency_key,
            "Content-Type": "application/json",
        }

    def _delay(self, attempt: int, started: float, path: str, error: str) -> float:
        """Seconds until the next try, which asks anew where the coordinator is. Raises CoordinatorGone when patience is over."""
        self._base = None
        waited = time.monotonic() - started
        if waited > self._patience_s:
            raise CoordinatorGone("coordinator_gone", f"no answer to {path} for {waited:.0f} s: {error}")
        return random.uniform(0.5, 1.0) * min(_BACKOFF_CAP_S, 0.05 * 2**attempt)

    @staticmethod
    def _read(endpoint: Endpoint[Req, Rep], status: int, content: bytes) -> Rep:
        if status != 200:
            raise InfraError("coordinator_refused", f"{endpoint.path}: {status} {_error_text(content)}")
        return endpoint.reply.model_validate_json(content)


def _error_text(content: bytes) -> str:
    """The one line of an error's body, or the beginning of whatever was sent instead."""
    with contextlib.suppress(ValueError):
        error = json.loads(content)
        if isinstance(error, dict) and isinstance(error.get("error"), str):
            return str(error["error"])
    return content[:500].decode("utf-8", "replace")


class Client(_Base):
    """Blocking client (trainer, inference receiver, launcher, CLI). Safe to use from several threads."""

    def __init__(self, run: RunDir, role: Role, patience_s: float = 60.0) -> None:
        super().__init__(run, role, patience_s)
        self._http = httpx.Client(timeout=_HTTP_TIMEOUT, trust_env=False)

    def call(self, endpoint: Endpoint[Req, Rep], request: Req) -> Rep:
        """Make the call, retrying while the coordinator is away. Raises CoordinatorGone, InfraError."""
        body, key, started, attempt = request.model_dump_json(), secrets.token_hex(16), time.monotonic(), 0
        while True:
            try:
                response = self._http.post(self._url(endpoint), content=body, headers=self._headers(key))
                if response.status_code not in _RETRY_STATUS:
                    return self._read(endpoint, response.status_code, response.content)
                error = f"HTTP {response.status_code}"
            except (httpx.TransportError, _NotAnnounced) as caught:
                error = str(caught) or type(caught).__name__
            time.sleep(self._delay(attempt, started, endpoint.path, error))
            attempt += 1

    def close(self) -> None:
        self._http.close()


class AsyncClient(_Base):
    """asyncio client (worker, scorer); aiohttp, because its calls cost a tenth of httpx's CPU time."""

    def __init__(self, run: RunDir, role: Role, patience_s: float = 60.0) -> None:
        super().__init__(run, role, patience_s)
        self._http: aiohttp.ClientSession | None = None

    async def call(self, endpoint: Endpoint[Req, Rep], request: Req) -> Rep:
        """Make the call, retrying while the coordinator is away. Raises CoordinatorGone, InfraError."""
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60.0, sock_connect=5.0))
        body, key, started, attempt = request.model_dump_json(), secrets.token_hex(16), time.monotonic(), 0
        while True:
            try:
                headers = self._headers(key)
                async with self._http.post(self._url(endpoint), data=body, headers=headers) as response:
                    content = await response.read()
                if response.status not in _RETRY_STATUS:
                    return self._read(endpoint, response.status, content)
                error = f"HTTP {response.status}"
            except (aiohttp.ClientError, _NotAnnounced, TimeoutError) as caught:
                error = str(caught) or type(caught).__name__
            await asyncio.sleep(self._delay(attempt, started, endpoint.path, error))
            attempt += 1

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()


def wait_for_endpoint(run: RunDir, role: str, timeout_s: float, alive: Callable[[], bool] = lambda: True) -> str:
    """Block until ``role`` has announced its URL. Raises InfraError after ``timeout_s`` or when ``alive()`` turns false."""
    deadline = time.monotonic() + timeout_s
    while alive():
        url = run.endpoint(role)
        if url is not None:
            return url
        if time.monotonic() > deadline:
            raise InfraError(
                "no_endpoint", f"{role} did not announce itself in {run.endpoints} within {timeout_s:.0f} s"
            )
        time.sleep(0.1)
    raise InfraError("no_endpoint", f"{role} ended before it announced itself")
