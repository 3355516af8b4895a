"""One attempt at a task without a run: who acts, its artifact, its score. For `hpcrl tasks check` and `hpcrl tasks run`.

    oracle     the task's own solution/, mounted at /solution: bash /solution/solve.sh in the work directory
    nothing    does nothing
    command    a program on this machine with a door to the sandbox, as `harness.kind: command` (harness/program.py); with an
               endpoint it may call a model there

Each attempt gets a sandbox of its own, and is scored in another, as in a run.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from hpcrl.errors import DataError, EnvironmentFault, InfraError, PolicyError, UserError
from hpcrl.harness.loop import Limits as HarnessLimits
from hpcrl.harness.program import run_program
from hpcrl.sandbox.base import Mount, Sandbox
from hpcrl.sandbox.images import Image, resolve
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.pool import SandboxPool
from hpcrl.sandbox.tasks import sandbox_spec
from hpcrl.scoring.private import PrivateTask
from hpcrl.scoring.runner import score

__all__ = ["NOTHING", "ORACLE", "Agent", "Trial", "images_with", "parse_agent", "try_tasks"]

_SOLUTION = "/solution"
_AGENT_S = 600.0
"""For an agent whose task has no [agent] timeout_sec."""
_TURNS = 100
_SHOWN = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Agent:
    """Example: ``Agent(kind="command", argv=("./agent.sh",), endpoint="http://127.0.0.1:8000/v1")``."""

    kind: Literal["oracle", "nothing", "command"]
    argv: tuple[str, ...] = ()
    endpoint: str = ""
    key: str = ""


ORACLE = Agent(kind="oracle")
NOTHING = Agent(kind="nothing")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """``reward`` is None when there is no score; ``failure`` then says why, or what the policy broke. ``seconds``: of agent
    and scoring."""

    task_id: str
    agent: str
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    detail: str = ""
    seconds: float = 0.0


def parse_agent(text: str, endpoint: str = "", key: str = "") -> Agent:
    """``oracle``, ``nothing`` or ``command:PROGRAM ARGUMENTS``. Raises UserError."""
    if text in ("oracle", "nothing"):
        return ORACLE if text == "oracle" else NOTHING
    kind, colon, command = text.partition(":")
    try:
        argv = tuple(shlex.split(command))
    except ValueError as error:
        raise UserError(f"--agent {text}: {error}") from error
    if kind != "command" or not colon or not argv:
        raise UserError(
            f"--agent {text}: allowed are oracle, nothing and command:PROGRAM, for example command:./agent.sh"
        )
    return Agent(kind="command", argv=argv, endpoint=endpoint, key=key)


def images_with(default: str) -> Callable[[PrivateTask], Image]:
    """The image of a task: its own, else ``default``. What it gives raises as resolve does."""

    def image_of(task: PrivateTask) -> Image:
        public = task.public
        return resolve(public.image, public.directory) if public.image is not None else resolve(default)

    return image_of


async def try_tasks(
    wanted: Sequence[tuple[PrivateTask, Agent]],
    image_of: Callable[[PrivateTask], Image | None],
    limits: Limits,
    pool: SandboxPool,
    at_once: int,
    done: Callable[[Trial], None] = lambda _: None,
) -> list[Trial]:
    """One trial for each of ``wanted``, in order, ``at_once`` at a time. Raises EnvironmentFault when this machine is at fault."""
    slots = asyncio.Semaphore(at_once)

    async def one(task: PrivateTask, agent: Agent) -> Trial:
        async with slots:
            trial = await _try(task, agent, image_of, limits, pool)
        done(trial)
        return trial

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(task, agent)) for task, agent in wanted]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the first cause; what it cancelled says nothing
    return [task.result() for task in tasks]


async def _try(
    task: PrivateTask, agent: Agent, image_of: Callable[[PrivateTask], Image | None], limits: Limits, pool: SandboxPool
) -> Trial:
    """The one place where a trial's failure is recorded."""
    began = time.monotonic()
    name = task.public.task_id
    try:
        image = await asyncio.to_thread(_image, image_of, task)
        artifact, said, broke = await _act(task, agent, image, limits, pool)
        result = await score(task, artifact, image, limits, pool, f"score-{name}")
    except (InfraError, DataError, PolicyError, UserError) as error:
        seconds = time.monotonic() - began
        return Trial(task_id=name, agent=agent.kind, failure=str(error), seconds=seconds)
    return Trial(
        task_id=name,
        agent=agent.kind,
        reward=result.reward,
        rewards=result.rewards,
        failure=result.policy_failure or broke,
        detail="; ".join(part for part in (said, result.detail.strip()[-_SHOWN:]) if part),
        seconds=time.monotonic() - began,
    )


def _image(image_of: Callable[[PrivateTask], Image | None], task: PrivateTask) -> Image | None:
    try:
        return image_of(task)
    except EnvironmentFault as error:  # of this task's image alone
        raise InfraError("image", str(error)) from error


async def _act(
    task: PrivateTask, agent: Agent, image: Image | None, limits: Limits, pool: SandboxPool
) -> tuple[bytes, str, str | None]:
    """(artifact, what went wrong in words, what the agent broke)."""
    spec = sandbox_spec(task.public, image, limits)
    if agent.kind == "oracle":
        if task.solution is None:
            raise UserError("the task has no solution/solve.sh")
        spec = replace(
            spec,
            env={**spec.env, **task.solution_env},
            mounts=(Mount(target=_SOLUTION, source=task.solution.parent),),
        )
    said, broke = "", None
    async with pool.sandbox(spec, f"{agent.kind}-{task.public.task_id}") as sandbox:
        try:
            if agent.kind == "oracle":
                said = await _solve(sandbox, task)
            elif agent.kind == "command":
                said, broke = await _program(sandbox, task, agent, limits)
        except PolicyError as error:
            broke = error.reason
        return await sandbox.artifact(), said, broke


async def _solve(sandbox: Sandbox, task: PrivateTask) -> str:
    seconds = task.public.agent_timeout_s or _AGENT_S
    script = f"{_SOLUTION}/solve.sh"
    command = f'if command -v bash >/dev/null; then exec bash "{script}"; else exec sh "{script}"; fi'
    result = await sandbox.run(command, seconds)
    if result.timed_out:
        return f"solve.sh did not end within {seconds:g} s"
    if result.exit_code != 0:
        return f"solve.sh ended with status {result.exit_code}: {result.output[-_SHOWN:].strip()}"
    return ""


async def _program(sandbox: Sandbox, task: PrivateTask, agent: Agent, limits: Limits) -> tuple[str, str | None]:
    seconds = task.public.agent_timeout_s or _AGENT_S
    bounds = HarnessLimits(
        max_turns=_TURNS,
        command_timeout_s=limits.command_timeout_s,
        call_timeout_s=seconds,
        deadline=time.time() + seconds,
    )
    outcome = await run_program(
        agent.argv, task.public.instruction, sandbox, bounds, base_url=agent.endpoint, api_key=agent.key
    )
    return (f"the program ended with {outcome.problem}" if outcome.problem else ""), outcome.policy_failure
