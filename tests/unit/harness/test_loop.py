from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from hpcrl.clock import ManualClock
from hpcrl.errors import InfraError, PolicyError
from hpcrl.harness import ContextExceeded, Limits, Outcome, Reply, run_attempt
from hpcrl.harness.client import Message


@dataclass
class Result:
    output: str = ""
    exit_code: int = 0
    timed_out: bool = False


@dataclass
class FakeShell:
    """Answers commands from a table; a command may also be an error to raise. Each takes ``seconds`` on the clock."""

    answers: dict[str, Result | Exception] = field(default_factory=dict)
    clock: ManualClock = field(default_factory=ManualClock)
    seconds: float = 0.0
    ran: list[tuple[str, float]] = field(default_factory=list)

    async def run(self, command: str, timeout_s: float) -> Result:
        self.ran.append((command, timeout_s))
        self.clock.advance(self.seconds)
        answer = self.answers.get(command, Result())
        if isinstance(answer, Exception):
            raise answer
        return answer


class FakeModel:
    """Says the given replies in order; remembers what it was shown."""

    def __init__(
        self, *replies: Reply | str | Exception, clock: ManualClock | None = None, seconds: float = 0.0
    ) -> None:
        self.replies = list(replies)
        self.shown: list[list[Message]] = []
        self.clock = clock or ManualClock()
        self.seconds = seconds
        self.timeouts: list[float] = []

    async def complete(self, messages: Sequence[Message], timeout_s: float) -> Reply:
        self.shown.append(list(messages))
        self.timeouts.append(timeout_s)
        self.clock.advance(self.seconds)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, Reply) else Reply(reply, "stop", f"r{len(self.shown)}")


def bash(command: str) -> str:
    return f"```bash\n{command}\n```"


LIMITS = Limits(max_turns=3, command_timeout_s=5, call_timeout_s=7, deadline=100)


def attempt(model: FakeModel, shell: FakeShell, limits: Limits = LIMITS, clock: ManualClock | None = None) -> Outcome:
    return asyncio.run(run_attempt("Fix it.", shell, model, limits, (clock or ManualClock()).now))


def test_output_goes_back_verbatim_and_a_reply_without_command_ends() -> None:
    model = FakeModel(bash("cat sol.py"), "All done.")
    outcome = attempt(model, FakeShell({"cat sol.py": Result("def f():\n  return 1\n", exit_code=3)}))
    assert outcome.ended == "no_command" and outcome.policy_failure is None
    assert model.shown[1] == [
        {"role": "user", "content": "Fix it."},
        {"role": "assistant", "content": bash("cat sol.py")},
        {"role": "user", "content": "def f():\n  return 1\n"},
    ]
    assert outcome.request_ids == ["r1", "r2"] and (outcome.turns, outcome.commands) == (2, 1)


def test_no_model_call_after_the_last_turns_command() -> None:
    model, shell = FakeModel(bash("a"), bash("b"), bash("c"), bash("never")), FakeShell()
    outcome = attempt(model, shell)
    assert outcome.ended == "max_turns" and [command for command, _ in shell.ran] == ["a", "b", "c"]
    assert len(model.shown) == 3


def test_a_reply_cut_by_length_is_never_executed() -> None:
    shell = FakeShell()
    outcome = attempt(FakeModel(Reply(bash("rm -rf sol.py"), "length")), shell)
    assert outcome.ended == "length" and shell.ran == [] and outcome.policy_failure is None


def test_several_blocks_run_nothing_and_say_so() -> None:
    model, shell = FakeModel(bash("a") + "\n" + bash("b"), "stop"), FakeShell()
    attempt(model, shell)
    assert shell.ran == [] and "2 bash blocks" in model.shown[1][-1]["content"]


def test_exit_code_only_when_asked_and_timeout_always() -> None:
    model = FakeModel(bash("a"), bash("b"), "stop")
    shell = FakeShell({"a": Result("no newline", exit_code=2), "b": Result("", exit_code=137, timed_out=True)})
    limits = Limits(max_turns=3, command_timeout_s=5, call_timeout_s=7, deadline=100, show_exit_code=True)
    outcome = attempt(model, shell, limits)
    assert model.shown[1][-1]["content"] == "no newline\n[exit code 2]\n"
    assert model.shown[2][-1]["content"] == "[stopped after 5 s]\n"
    assert outcome.commands_timed_out == 1


def test_a_broken_sandbox_is_the_policys_failure() -> None:
    outcome = attempt(FakeModel(bash("kill -9 -1")), FakeShell({"kill -9 -1": PolicyError("sandbox_dead")}))
    assert (outcome.ended, outcome.policy_failure) == ("policy_failure", "sandbox_dead")


def test_a_full_context_ends_the_attempt() -> None:
    outcome = attempt(FakeModel(bash("cat big"), ContextExceeded("too long")), FakeShell())
    assert (outcome.ended, outcome.policy_failure, outcome.turns) == ("truncated", "truncated", 1)


def test_infrastructure_failures_are_raised() -> None:
    with pytest.raises(InfraError, match="stale_version"):
        attempt(FakeModel(InfraError("stale_version")), FakeShell())
    with pytest.raises(InfraError, match="sandbox_killed"):
        attempt(FakeModel(bash("a")), FakeShell({"a": InfraError("sandbox_killed")}))


def test_timeouts_shrink_with_the_time_left() -> None:
    clock = ManualClock(96)
    model, shell = FakeModel(bash("a"), "stop", clock=clock, seconds=1), FakeShell(clock=clock)
    attempt(model, shell, clock=clock)
    assert model.timeouts[0] == 4 and shell.ran == [("a", 3)]


def test_time_over_is_policy_when_spent_in_commands_else_infra() -> None:
    clock = ManualClock()
    slow = FakeShell(clock=clock, seconds=99.99)
    outcome = attempt(FakeModel(bash("sleep"), "x", clock=clock), slow, clock=clock)
    assert outcome.policy_failure == "attempt_timeout"
    clock = ManualClock()
    with pytest.raises(InfraError, match="attempt_timeout"):
        attempt(FakeModel(bash("a"), "x", clock=clock, seconds=99.99), FakeShell(clock=clock), clock=clock)


def test_the_opening_comes_before_the_instruction() -> None:
    opening = [{"role": "system", "content": "Use bash."}]
    for messages, roles in (((), ["user"]), (opening, ["system", "user"])):
        model = FakeModel("no command")
        limits = Limits(max_turns=1, command_timeout_s=1.0, call_timeout_s=1.0, deadline=10.0)
        asyncio.run(run_attempt("Do it.", FakeShell(), model, limits, model.clock.now, opening=messages))
        assert [message["role"] for message in model.shown[0]] == roles
    assert len(opening) == 1, "the opening is shared by all attempts of a worker"
