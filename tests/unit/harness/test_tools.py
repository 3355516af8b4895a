from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpcrl.harness import TOOLS, Limits, Outcome, Reply, ToolCall, run_attempt
from hpcrl.harness.steps import End, Run, Say
from hpcrl.harness.tools import decide
from hpcrl.protocol.record import MALFORMED_TOOL_CALL


def call(name: str, arguments: Any, call_id: str = "c1") -> ToolCall:
    return ToolCall(call_id, name, arguments if isinstance(arguments, str) else json.dumps(arguments))


def reply(*calls: ToolCall, finish_reason: str = "tool_calls") -> Reply:
    return Reply("", finish_reason, "q0", calls)


def only(made: ToolCall) -> Run | Say:
    decision = decide(reply(made))
    assert not isinstance(decision, End)
    (step,) = decision
    return step


def test_parallel_calls_are_run_in_order_and_answered_one_by_one() -> None:
    ran: list[str] = []

    class Result:
        exit_code, timed_out = 0, False

        def __init__(self, output: str, exit_code: int = 0) -> None:
            self.output, self.exit_code = output, exit_code

    class Shell:
        async def run(self, command: str, timeout_s: float) -> Result:
            ran.append(command)
            return Result(f"{len(ran)}\n", exit_code=len(ran) - 1)

    class Model:
        def __init__(self) -> None:
            calls = (("bash", {"command": "a"}), ("nope", {}), ("read_file", {"path": "b c"}))
            self.replies = [reply(*(call(name, given, f"c{at + 1}") for at, (name, given) in enumerate(calls)))]

        async def complete(self, messages: Any, timeout_s: float) -> Reply:
            self.shown = list(messages)
            return self.replies.pop(0) if self.replies else Reply("done", "stop", "q1")

    async def main() -> tuple[Outcome, Model]:
        model = Model()
        limits = Limits(max_turns=3, command_timeout_s=5, call_timeout_s=5, deadline=1e12)
        return await run_attempt("Fix it.", Shell(), model, limits, agent=TOOLS), model

    outcome, model = asyncio.run(main())
    assert ran == ["a", "cat -- 'b c'"]
    assert (outcome.ended, outcome.turns, outcome.commands, outcome.policy_failure) == ("no_command", 2, 2, None)
    first, *results = model.shown[1:]
    assert [one["id"] for one in first["tool_calls"]] == ["c1", "c2", "c3"]
    assert [(one["role"], one["tool_call_id"]) for one in results] == [("tool", "c1"), ("tool", "c2"), ("tool", "c3")]
    assert [one["content"] for one in results][::2] == ["1\n", "2\n[exit code 1]\n"]
    assert "bash, read_file, write_file" in results[1]["content"]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (call(MALFORMED_TOOL_CALL, "{"), "not a JSON object"),
        (call("rm", {}), "there is no tool 'rm'"),
        (call("bash", "{"), "are not JSON"),
        (call("bash", "[" * 100_000), "are not JSON"),
        (call("bash", [1]), "must be a JSON object"),
        (call("bash", {}), "needs the argument 'command'"),
        (call("bash", {"command": 3}), "must be text"),
        (call("bash", {"command": "a", "timeout": 3}), "no argument 'timeout'"),
        (call("write_file", {"path": "a", "content": "\0"}), "NUL"),
        (call("bash", {"command": "\ud800"}), "half of a surrogate pair"),
    ],
)
def test_a_call_that_cannot_be_run_is_answered_readably(made: ToolCall, says: str) -> None:
    step = only(made)
    assert isinstance(step, Say) and step.call_id == "c1"
    assert says in step.text and step.text.startswith("Nothing was run: ")


def test_a_reply_cut_by_length_runs_nothing_and_one_without_calls_ends() -> None:
    assert decide(reply(call("bash", {"command": "rm -rf ."}), finish_reason="length")) == End("length")
    assert decide(Reply("done", "stop")) == End("no_command")


def test_files_are_written_and_read_by_a_real_shell(tmp_path: Path) -> None:
    content = "it's\n$HOME `x` \\ %s é\n"
    for path in ("new dir/-a'b.txt", "plain", "-dash"):
        write, read = (
            only(call("write_file", {"path": path, "content": content})),
            only(call("read_file", {"path": path})),
        )
        assert isinstance(write, Run) and isinstance(read, Run)
        subprocess.run(["sh", "-c", write.command], cwd=tmp_path, check=True)
        done = subprocess.run(["sh", "-c", read.command], cwd=tmp_path, check=True, capture_output=True)
        assert done.stdout.decode() == content


def test_the_schemas_name_what_is_required() -> None:
    functions = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS.tools}
    assert functions["write_file"]["required"] == ["path", "content"]
    assert set(functions) == {"bash", "read_file", "write_file"}
