"""Harnesses, unmodified, against the real proxy over HTTP, with commands run by a real shell; only the engine is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
from toy import ToyTokenizer

from hpcrl.bench.stub_engine import StubEngine
from hpcrl.config.schema import RunConfig
from hpcrl.config.sections import ModelSection, RolloutSection, TasksSection
from hpcrl.harness import TOOLS, ChatClient, Limits, Outcome, run_attempt, run_program
from hpcrl.inference.proxy import Proxy
from hpcrl.protocol.keys import AttemptKey, records_key, sign_attempt_key
from hpcrl.protocol.messages import Lease, Sampling, ScoredAttempt
from hpcrl.protocol.record import AttemptRecord
from hpcrl.run.attempts import fetch_record
from hpcrl.trajectory import from_record

SECRET, VERSION = "s", "0.1"
AGENTS = Path(__file__).parents[2] / "configs" / "agents"
CONFIG = RunConfig(
    model=ModelSection(path="m"),
    tasks=TasksSection(train="t"),
    rollout=RolloutSection(context_tokens=4000, max_tokens=2000),
)


@dataclass
class Result:
    output: str
    exit_code: int
    timed_out: bool = False


@dataclass
class RealShell:
    """Runs commands in a directory, without any sandbox."""

    folder: Path
    ran: list[str] = field(default_factory=list)

    async def run(self, command: str, timeout_s: float) -> Result:
        self.ran.append(command)
        process = await asyncio.create_subprocess_exec(
            *("sh", "-c", command), cwd=self.folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await process.communicate()
        return Result(output.decode(), process.returncode or 0)


@dataclass
class Place:
    """A served proxy, and one attempt of it."""

    base_url: str
    engine: StubEngine
    session: aiohttp.ClientSession
    api_key: str = sign_attempt_key(SECRET, AttemptKey("g0-r0-a0", VERSION, "r0"))

    async def trained(self) -> AttemptRecord:
        """The attempt's record, after it became a valid trajectory."""
        names = {"attempt_id": "g0-r0-a0", "rollout_id": "g0-r0", "group_id": "g0", "task_id": "t", "split": "train"}
        lease = Lease(
            **names,
            task_dir="/t",
            policy_version=VERSION,
            replica_id="r0",
            base_url=self.base_url,
            api_key=self.api_key,
            sampling=Sampling(),
            deadline_at=0.0,
        )
        record = await fetch_record(self.session, lease, records_key(SECRET))
        score = ScoredAttempt(attempt_id="g0-r0-a0", reward=1.0, rewards={}, verifier_version="v", scoring_s=0.0)
        trajectory = from_record(lease, record, score, run_id="run", environment_version="e")
        assert trajectory.trained_tokens > 0
        return record


@contextlib.asynccontextmanager
async def served(replies: list[str]) -> AsyncIterator[Place]:
    engine = StubEngine(iter([[*map(ord, reply)] for reply in replies]), VERSION)
    proxy = Proxy(CONFIG, SECRET, "r0", engine, ToyTokenizer())
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(proxy.app, log_level="warning", lifespan="off"))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with aiohttp.ClientSession() as session:
            yield Place(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", engine, session)
    finally:
        server.should_exit = server.force_exit = True
        await task


def run(replies: list[str], scenario: Callable[[Place], Awaitable[None]]) -> None:
    async def main() -> None:
        async with served(replies) as place:
            await scenario(place)

    asyncio.run(main())


def limits(turns: int = 4) -> Limits:
    return Limits(max_turns=turns, command_timeout_s=30, call_timeout_s=30, deadline=time.time() + 120)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_the_tools_harness_learns_from_its_mistakes_in_one_segment(tmp_path: Path) -> None:
    (tmp_path / "sol.py").write_text("wrong\n")
    replies = [
        call("read_file", '{"path": "sol.py"}') + "\n" + call("bash", '{"cmd": "ls"}'),
        "Again.\n<tool_call>\n{broken\n</tool_call>",
        call("write_file", '{"path": "sol.py", "content": "right\\n"}'),
        "Done.",
    ]

    async def scenario(place: Place) -> None:
        model = ChatClient(place.session, place.base_url, place.api_key, 500, tools=TOOLS.tools)
        outcome: Outcome = await run_attempt("Fix it.", RealShell(tmp_path), model, limits(), agent=TOOLS)
        assert (outcome.ended, outcome.policy_failure, outcome.commands) == ("no_command", None, 2)
        assert (tmp_path / "sol.py").read_text() == "right\n"
        record = await place.trained()
        assert record.segments == [0]
        assert [request.ending for request in record.requests] == ["tool_calls", "tool_calls", "tool_calls", "stop"]
        results = [message["content"] for message in record.messages if message["role"] == "tool"]
        assert (
            results[0] == "wrong\n"
            and "needs the argument 'command'" in results[1]
            and "not a JSON object" in results[2]
        )
        sampled = [token for token, mask in zip(record.token_ids, record.loss_mask, strict=True) if mask]
        assert ToyTokenizer().decode(sampled) == "<|im_end|>".join([*said, ""])

    said = list(replies)
    run(replies, scenario)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_an_agent_in_bash_and_curl(tmp_path: Path) -> None:
    (tmp_path / "sol.py").write_text('say("é\t\\n")\n')
    replies = ["Look.\n```bash\ncat sol.py\n```", '```bash\necho "right é" > sol.py\n```', "Done."]

    async def scenario(place: Place) -> None:
        shell = RealShell(tmp_path)
        outcome = await run_program(
            [str(AGENTS / "curl-agent.sh")],
            'Fix "it".\n',
            shell,
            limits(),
            base_url=place.base_url,
            api_key=place.api_key,
        )
        assert outcome.problem is None
        assert shell.ran == ["cat sol.py", 'echo "right é" > sol.py']
        assert (tmp_path / "sol.py").read_text() == "right é\n"
        record = await place.trained()
        assert record.segments == [0] and len(record.requests) == 3
        assert record.messages[0]["content"] == 'Fix "it".\n'
        assert record.messages[2]["content"] == 'say("é\t\\n")\n'

    run(replies, scenario)


@pytest.mark.timeout(900)
def test_mini_swe_agent(tmp_path: Path) -> None:
    """Starts in the time that litellm needs to be imported: seconds, or minutes on a busy machine."""
    (tmp_path / "sol.py").write_text("wrong\n")
    replies = [
        "THOUGHT: look.\n" + call("bash", '{"command": "cat sol.py"}'),
        "no tool call",
        call("bash", '{"command": "echo right > sol.py"}'),
        call("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}'),
    ]

    async def scenario(place: Place) -> None:
        shell = RealShell(tmp_path)
        argv = [sys.executable, str(AGENTS / "mini-swe-agent.py")]
        patient = Limits(max_turns=8, command_timeout_s=60, call_timeout_s=60, deadline=time.time() + 800)
        outcome = await run_program(argv, "Fix it.\n", shell, patient, base_url=place.base_url, api_key=place.api_key)
        assert outcome.problem is None
        assert shell.ran[:2] == ["cat sol.py", "echo right > sol.py"] and len(shell.ran) == 3
        assert (tmp_path / "sol.py").read_text() == "right\n"
        record = await place.trained()
        assert [request.ending for request in record.requests] == ["tool_calls", "stop", "tool_calls", "tool_calls"]
        assert next(place.engine.replies, None) is None

    run(replies, scenario)


def test_the_openai_client(tmp_path: Path) -> None:
    import openai

    replies = [call("bash", '{"command": "ls"}'), "Hel\nlo é", "again"]

    def talk(base_url: str, api_key: str) -> None:
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        assert [model.id for model in client.models.list()] == ["policy"]
        messages: list[Any] = [{"role": "user", "content": "x"}]
        reply = client.chat.completions.create(model="policy", messages=messages, tools=list(TOOLS.tools)).choices[0]
        assert reply.finish_reason == "tool_calls" and reply.message.content is None
        (made,) = reply.message.tool_calls
        messages += [reply.message, {"role": "tool", "tool_call_id": made.id, "content": "sol.py"}]
        chunks = list(
            client.chat.completions.create(model="policy", messages=messages, tools=list(TOOLS.tools), stream=True)
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == "Hel\nlo é" and chunks[-1].choices[0].finish_reason == "stop"
        with pytest.raises(openai.BadRequestError, match="top_k"):
            client.chat.completions.create(model="policy", messages=messages, extra_body={"top_k": 3})
        assert client.completions.create(model="policy", prompt="once").choices[0].text == "again"

    async def scenario(place: Place) -> None:
        await asyncio.to_thread(talk, place.base_url, place.api_key)
        record = await place.trained()
        assert [request.opens for request in record.requests] == ["first", None, "history"]
        assert [request.ending for request in record.requests] == ["tool_calls", "stop", "stop"]

    run(replies, scenario)
