"""One attempt: model and sandbox take turns until the agent is done or a limit is reached.

    ┌─► model.complete(messages) ─► decide ─► End                         → ended: no_command, length
    │                                 ├─► Run ─► sandbox.run(command) ─┐
    │                                 └─► Say ────────────────────────┤     one step, or several in order
    └──────────── turns left ◄── append the observations ◄────────────┘     no turns left → ended: max_turns

Sequential within an attempt; a worker runs many attempts as asyncio tasks. Whoever awaits ``run_attempt`` may cancel it: the
model call's connection is dropped and the sandbox is the caller's to stop.

Failures. What the agent caused ends the attempt and is told in ``Outcome.policy_failure``; the attempt is scored as it stands.
What the infrastructure caused is raised as InfraError. When the attempt's own time is over, the larger part decides: mostly
spent in the agent's commands is the policy's failure, mostly spent waiting for the model is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from hpcrl.errors import InfraError, PolicyError
from hpcrl.harness.bash import BASH, observation
from hpcrl.harness.client import ContextExceeded, Message, Model
from hpcrl.harness.steps import Agent, Decision, End, Run, Say

__all__ = ["CommandOutput", "Ended", "Limits", "Outcome", "Shell", "run_attempt"]

Ended = Literal["no_command", "length", "max_turns", "truncated", "policy_failure", "program"]

_LEAST_CALL_S = 0.05
"""Below this much remaining time a call or command cannot finish: the attempt's time counts as over."""


class CommandOutput(Protocol):
    """What the loop reads of a command's result. ``output``: stdout and stderr in the order they came."""

    @property
    def exit_code(self) -> int: ...
    @property
    def output(self) -> str: ...
    @property
    def timed_out(self) -> bool: ...


class Shell(Protocol):
    """What the loop needs of a sandbox. ``run`` raises PolicyError when the agent broke it, InfraError when the node did."""

    async def run(self, command: str, timeout_s: float) -> CommandOutput: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one attempt. Seconds; ``deadline`` is on the clock given to ``run_attempt``."""

    max_turns: int
    command_timeout_s: float
    call_timeout_s: float
    deadline: float
    show_exit_code: bool = False


@dataclass(slots=True)
class Outcome:
    """How an attempt ended.

    ``policy_failure`` is a short reason when the agent caused the end (``sandbox_dead``, ``attempt_timeout``,
    ``truncated``), else None. ``request_ids`` names every completed model call in order; ``messages`` is the conversation (of a
    built-in harness). ``problem`` is what a program said that ended with an error.
    """

    ended: Ended = "max_turns"
    policy_failure: str | None = None
    turns: int = 0
    commands: int = 0
    commands_timed_out: int = 0
    model_s: float = 0.0
    command_s: float = 0.0
    request_ids: list[str] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    problem: str | None = None


async def run_attempt(
    instruction: str,
    shell: Shell,
    model: Model,
    limits: Limits,
    now: Callable[[], float] = time.time,
    opening: Sequence[Message] = (),
    agent: Agent = BASH,
) -> Outcome:
    """Run the agent to its end; ``opening`` are the messages before the instruction. Raises InfraError.

    ``model`` offers ``agent.tools``. After the last turn's command there is no further model call.
    """
    outcome = Outcome(messages=[*opening, {"role": "user", "content": instruction}])
    try:
        while outcome.turns < limits.max_turns:
            decision = await _turn(outcome, model, agent, limits, now)
            if isinstance(decision, End):
                outcome.ended = decision.ended
                return outcome
            for step in decision:
                text = step.text if isinstance(step, Say) else await _run(step, outcome, shell, limits, now)
                outcome.messages.append(_observed(text, step.call_id))
    except ContextExceeded as error:
        outcome.ended, outcome.policy_failure = "truncated", error.reason
    except PolicyError as error:
        outcome.ended, outcome.policy_failure = "policy_failure", error.reason
    return outcome


async def _turn(outcome: Outcome, model: Model, agent: Agent, limits: Limits, now: Callable[[], float]) -> Decision:
    """One model call; its reply joins the conversation."""
    left = _time_left(outcome, limits, now)
    started = now()
    try:
        reply = await model.complete(outcome.messages, min(limits.call_timeout_s, left))
    finally:
        outcome.model_s += now() - started
    outcome.turns += 1
    outcome.request_ids.append(reply.request_id)
    outcome.messages.append(reply.message())
    return agent.decide(reply)


def _observed(text: str, call_id: str | None) -> Message:
    if call_id is None:
        return {"role": "user", "content": text}
    return {"role": "tool", "tool_call_id": call_id, "content": text}


async def _run(step: Run, outcome: Outcome, shell: Shell, limits: Limits, now: Callable[[], float]) -> str:
    """One command; gives the observation."""
    timeout_s = min(limits.command_timeout_s, _time_left(outcome, limits, now))
    started = now()
    try:
        result = await shell.run(step.command, timeout_s)
    finally:
        outcome.command_s += now() - started
    outcome.commands += 1
    outcome.commands_timed_out += result.timed_out
    show_exit_code = limits.show_exit_code or step.show_exit_code
    return observation(result.output, result.exit_code, result.timed_out, timeout_s, show_exit_code)


def _time_left(outcome: Outcome, limits: Limits, now: Callable[[], float]) -> float:
    left = limits.deadline - now()
    if left > _LEAST_CALL_S:
        return left
    spent = f"{outcome.command_s:.1f} s in commands, {outcome.model_s:.1f} s in model calls"
    failure = PolicyError if outcome.command_s > outcome.model_s else InfraError
    raise failure("attempt_timeout", spent)
