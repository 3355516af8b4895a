"""The life of one attempt on a worker, from its lease to its stored artifact and record.

    load task ─► start sandbox ─► the harness (model ⇄ sandbox) ─► artifact, stored by digest ─► record from the proxy ─► Ended
                     │                                                        └── sandbox stopped, whatever happened ──┘

Knows the proxy's side channel and the run directory, not the coordinator. Errors leave as they are typed: InfraError and DataError
end the attempt without a score; what the policy broke is in ``Ended.policy_failure``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from pydantic import ValidationError

from hpcrl.config import RunConfig
from hpcrl.errors import DataError, InfraError, PolicyError, UserError
from hpcrl.harness import BASH, TOOLS, ChatClient, Limits, Model, Outcome, Reply, run_attempt, run_program
from hpcrl.harness.client import Message
from hpcrl.harness.loop import CommandOutput, Shell
from hpcrl.metrics.sink import Value
from hpcrl.protocol.keyfiles import read_keys
from hpcrl.protocol.messages import ArtifactItem, Lease, SealedItem
from hpcrl.protocol.record import AttemptRecord, RecordRequest
from hpcrl.protocol.rundir import RunDir
from hpcrl.run.sandboxes import Images, empty_artifact, limits_of, pool_values, unusable
from hpcrl.sandbox.base import Sandbox
from hpcrl.sandbox.pool import SandboxPool
from hpcrl.sandbox.tasks import Task, load_task, sandbox_spec
from hpcrl.scoring.artifacts import store_artifact

__all__ = ["AttemptRunner", "Ended", "attempt_values", "fetch_record"]

_RECORD_TIMEOUT_S = 30.0
_SPARE_S = 5.0
"""The harness ends an attempt at its deadline and says whose fault that is; only what the harness cannot end dies by the sandbox's."""


@dataclass(slots=True)
class Ended:
    """An attempt whose agent has finished. ``timings`` is stage → seconds."""

    lease: Lease
    outcome: Outcome
    record: AttemptRecord
    artifact: ArtifactItem
    timings: dict[str, float] = field(default_factory=dict)


class _WatchedModel:
    """Tells when a model call begins and ends."""

    def __init__(self, model: Model, phase: Callable[[str], None]) -> None:
        self._model = model
        self._phase = phase

    async def complete(self, messages: Sequence[Message], timeout_s: float) -> Reply:
        self._phase("model call")
        return await self._model.complete(messages, timeout_s)


class _WatchedShell:
    """Tells when a command begins."""

    def __init__(self, shell: Shell, phase: Callable[[str], None]) -> None:
        self._shell = shell
        self._phase = phase

    async def run(self, command: str, timeout_s: float) -> CommandOutput:
        self._phase("tool call")
        return await self._shell.run(command, timeout_s)


class AttemptRunner:
    """Runs attempts; holds what they share: connections, the pool of sandboxes, images and tasks."""

    def __init__(
        self,
        run: RunDir,
        config: RunConfig,
        session: aiohttp.ClientSession,
        pool: SandboxPool,
        images: Images,
    ) -> None:
        self._run = run
        self._config = config
        self._session = session
        self._pool = pool
        self._images = images
        self._sandbox_limits = limits_of(config)
        self._records_key = read_keys(run, "worker").records
        self._opening = config.harness.opening()
        self._tasks: dict[str, Task] = {}

    def pool_values(self) -> dict[str, Value]:
        """Metrics of the pool of sandboxes."""
        return pool_values(self._pool)

    async def run(self, lease: Lease, phase: Callable[[str], None] = lambda name: None) -> Ended:
        """One attempt to its end; ``phase`` is told what it is doing. May be cancelled at any time (the sandbox is stopped).

        Raises InfraError, DataError.
        """
        began = time.monotonic()
        timings: dict[str, float] = {}
        try:
            task = await self._task(lease.task_dir)
            image = await self._images.for_attempt(task)
        except UserError as error:
            raise unusable(error) from error
        environment = task.environment_version(image) if image is not None else task.files_digest
        spec = sandbox_spec(task, image, self._sandbox_limits)
        started = time.monotonic()
        phase("sandbox start")
        async with self._pool.sandbox(spec, lease.attempt_id) as sandbox:
            timings["sandbox_start"] = time.monotonic() - started
            sandbox.end_after(max(0.0, lease.deadline_at - time.time()) + _SPARE_S)
            outcome = await self._harness(lease, task, sandbox, phase)
            timings["model"], timings["commands"] = outcome.model_s, outcome.command_s
            phase("record")
            started = time.monotonic()
            try:
                record = await fetch_record(self._session, lease, self._records_key)
            except DataError as error:
                if outcome.problem is not None:  # a program that failed before its first call left no record
                    raise _failed_program(outcome) from error
                raise
            timings["record"] = time.monotonic() - started
            _judge_program(outcome, record)
            phase("artifact")
            started = time.monotonic()
            artifact = await self._artifact(lease, environment, sandbox, outcome)
            timings["artifact"] = time.monotonic() - started
        timings["attempt"] = time.monotonic() - began
        _check_record(outcome, record)
        if outcome.problem is not None:
            raise _failed_program(outcome)
        return Ended(lease, outcome, record, artifact, timings)

    async def _task(self, task_dir: str) -> Task:
        task = self._tasks.get(task_dir)
        if task is None:
            task = self._tasks[task_dir] = await asyncio.to_thread(load_task, Path(task_dir))
        return task

    async def _harness(self, lease: Lease, task: Task, sandbox: Sandbox, phase: Callable[[str], None]) -> Outcome:
        """The agent as ``harness.kind`` says, to its end. Raises InfraError."""
        shell, limits, harness = _WatchedShell(sandbox, phase), self._limits(lease, task), self._config.harness
        if harness.kind == "command":
            phase("program")
            return await run_program(
                harness.command, task.instruction, shell, limits, base_url=lease.base_url, api_key=lease.api_key
            )
        agent = TOOLS if harness.kind == "tools" else BASH
        max_tokens = lease.sampling.max_tokens
        model = ChatClient(self._session, lease.base_url, lease.api_key, max_tokens, tools=agent.tools)
        watched = _WatchedModel(model, phase)
        return await run_attempt(task.instruction, shell, watched, limits, opening=self._opening, agent=agent)

    def _limits(self, lease: Lease, task: Task) -> Limits:
        deadline = lease.deadline_at
        if task.agent_timeout_s is not None:
            deadline = min(deadline, time.time() + task.agent_timeout_s)
        return Limits(
            max_turns=self._config.rollout.max_turns,
            command_timeout_s=self._config.sandbox.command_timeout_s,
            call_timeout_s=self._config.inference.request_timeout_s,
            show_exit_code=self._config.harness.show_exit_code,
            deadline=deadline,
        )

    async def _artifact(self, lease: Lease, environment: str, sandbox: Sandbox, outcome: Outcome) -> ArtifactItem:
        try:
            content = await sandbox.artifact()
        except PolicyError as error:  # too large to keep: the attempt is scored as if nothing had been changed
            outcome.ended, outcome.policy_failure = "policy_failure", error.reason
            content = empty_artifact()
        path, digest = await asyncio.to_thread(store_artifact, self._run, content)
        return ArtifactItem(
            attempt_id=lease.attempt_id,
            artifact=path,
            digest=digest,
            environment_version=environment,
            policy_failure=outcome.policy_failure,
        )


async def fetch_record(session: aiohttp.ClientSession, lease: Lease, worker_key: str) -> AttemptRecord:
    """Fetch the attempt's record from its proxy and close its session there. Raises InfraError, DataError."""
    url = lease.base_url.rstrip("/").removesuffix("/v1") + "/side/record"
    headers = {"Authorization": f"Bearer {worker_key}", "Content-Type": "application/json"}
    body = RecordRequest(attempt_id=lease.attempt_id).model_dump_json()
    timeout = aiohttp.ClientTimeout(total=_RECORD_TIMEOUT_S)
    try:
        async with session.post(url, data=body, headers=headers, timeout=timeout) as response:
            status, content = response.status, await response.read()
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise InfraError("record_fetch", f"{url}: {str(error) or type(error).__name__}") from error
    if status >= 500:
        raise InfraError("record_fetch", f"{url}: HTTP {status} {content[:300]!r}")
    if status != 200:
        raise DataError("no_record", f"{url}: HTTP {status} {content[:300]!r}")
    try:
        return AttemptRecord.model_validate_json(content)
    except ValidationError as error:
        raise DataError(
            "record_invalid", f"attempt {lease.attempt_id}: {' '.join(str(error).split())[:500]}"
        ) from error


def _judge_program(outcome: Outcome, record: AttemptRecord) -> None:
    """What a program does not tell, its record does: how many calls it made, and whether its context was full."""
    if outcome.ended != "program":
        return
    outcome.turns = len(record.requests)
    outcome.model_s = sum(request.queue_s + request.generate_s for request in record.requests)
    if record.requests and record.requests[-1].ending == "truncated":
        outcome.ended, outcome.policy_failure, outcome.problem = "truncated", "truncated", None


def _failed_program(outcome: Outcome) -> InfraError:
    return InfraError("harness_exit", f"harness.command ended with exit code {outcome.problem}")


def _check_record(outcome: Outcome, record: AttemptRecord) -> None:
    """Every call that the harness made must be in the record, else tokens are missing from it."""
    recorded = {request.request_id for request in record.requests}
    missing = [name for name in outcome.request_ids if name not in recorded]
    if missing:
        raise DataError(
            "record_incomplete",
            f"attempt {record.attempt_id}: {len(missing)} of {len(outcome.request_ids)} calls are not recorded ({missing[0]})",
        )


def attempt_values(ended: Ended, sealed: SealedItem, seal_wait_s: float) -> dict[str, Value]:
    """The metrics line of one finished attempt (names: metrics/names.py)."""
    outcome, timings = ended.outcome, ended.timings
    values: dict[str, Value] = {
        "attempt_s": timings["attempt"],
        "sandbox_start_s": timings["sandbox_start"],
        "model_s": timings["model"],
        "commands_s": timings["commands"],
        "artifact_s": timings["artifact"],
        "record_s": timings["record"],
        "score_wait_s": timings["score_wait"],
        "seal_wait_s": seal_wait_s,
        "turns": outcome.turns,
        "commands": outcome.commands,
        "commands_timed_out": outcome.commands_timed_out,
        "attempt_ends": {outcome.ended: 1},
        "trajectory_tokens": sealed.tokens,
        "tokens_sampled": sealed.trained_tokens,
    }
    if outcome.policy_failure is not None:
        values["policy_failures"] = {outcome.policy_failure: 1}
    return values
