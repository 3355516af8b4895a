"""10,000 random and hostile requests against the ASGI application: every answer is a 200 or a clear 4xx, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import string
from typing import Any

from test_proxy import CONFIG, SECRET, FakeEngine
from toy import ToyTokenizer

from hpcrl.inference.proxy import Proxy
from hpcrl.protocol.keys import AttemptKey, records_key, sign_attempt_key

REQUESTS = 10_000
ATTEMPTS = 20
PATHS = [
    "/v1/chat/completions",
    "/v1/chat/completions",
    "/v1/completions",
    "/side/record",
    "/v1/models",
    "/",
]
NAMES = ["messages", "prompt", "tools", "tool_choice", "stream", "stream_options", "stop", "seed", "n", "max_tokens"]
NAMES += ["temperature", "top_p", "model", "logprobs", "response_format", "attempt_id", "parallel_tool_calls", "user"]
INSIDE = [
    "role",
    "content",
    "tool_calls",
    "tool_call_id",
    "name",
    "type",
    "text",
    "function",
    "arguments",
    "id",
    "parameters",
]
TEXTS = [
    "user",
    "assistant",
    "tool",
    "system",
    "function",
    "text",
    "auto",
    "",
    "\0",
    "\ud800",
    "<|im_end|>",
    "<tool_call>{",
    "é🙂",
    '{"a": "\\ud800"}',
    '{"a": 1e999}',
    '{"a": ' + "[" * 200 + "]" * 200 + "}",
]


class Hostile:
    """Bodies from nearly right to nonsense."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def value(self, depth: int = 0) -> Any:
        pick = self.random.random()
        if depth < 4 and pick < 0.15:
            return [self.value(depth + 1) for _ in range(self.random.randint(0, 4))]
        if depth < 4 and pick < 0.45:
            names = self.random.sample(INSIDE, self.random.randint(0, 4))
            return {name: self.value(depth + 1) for name in names}
        if pick < 0.75:
            return self.random.choice(TEXTS)
        if depth and pick < 0.8:
            return [self.call()]
        return self.random.choice(
            [
                None,
                True,
                False,
                0,
                1,
                -1,
                1 << 70,
                10**400,
                0.7,
                1e308,
                float("nan"),
                float("inf"),
                "x" * 5000,
                "".join(string.printable),
            ]
        )

    def call(self) -> Any:
        """A tool call, nearly right: what stands in its arguments is JSON within JSON."""
        function = {"name": "f", "arguments": self.random.choice(TEXTS)}
        return {"id": "c", "type": "function", "function": function}

    def message(self) -> Any:
        message = {"role": self.random.choice(["user", "assistant", "tool", "system"]), "content": "hi"}
        if self.random.random() < 0.5:
            message[self.random.choice(INSIDE)] = self.value()
        if self.random.random() < 0.1:
            message = {"role": "assistant", "content": "hi", "tool_calls": [self.call()]}
        return message

    def body(self) -> bytes:
        body: Any = {"messages": [self.message() for _ in range(self.random.randint(1, 3))]}
        if self.random.random() < 0.2:
            body = {"prompt": self.random.choice(["once", [1, 2], self.value()])}
        for _ in range(self.random.randint(0, 2)):
            body[self.random.choice(NAMES)] = self.value()
        pick = self.random.random()
        if pick < 0.05:
            body = self.value()
        data = json.dumps(body).encode()
        if pick > 0.97:
            depth = self.random.choice([50, 100, 2000, 200_000])
            data = b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"
        elif pick > 0.94:
            data = data[: self.random.randint(0, len(data))]
        elif pick > 0.91:
            at = self.random.randint(0, len(data))
            data = data[:at] + self.random.randbytes(3) + data[at:]
        elif pick > 0.909:
            data = json.dumps({"messages": [{"role": "tool", "content": "y" * (1 << 20)}]}).encode()
        elif pick > 0.89:  # half of a surrogate pair, as bytes and as an escape
            data = data.replace(b'"hi"', self.random.choice([b'"\xed\xa0\x80"', b'"\\ud800"', b'"\\udc00\\ud800"']))
        elif pick > 0.84 and isinstance(body, dict):
            data = json.dumps({**body, "tools": [self.tool() for _ in range(self.random.randint(1, 3))]}).encode()
        elif pick > 0.8399:
            data = b'{"messages": "' + b"z" * (16 << 20) + b'"}'
        return data

    def tool(self) -> Any:
        """Nearly right."""
        function: dict[str, Any] = {"name": "f", "description": "d", "parameters": {"type": "object"}}
        if self.random.random() < 0.5:
            function[self.random.choice([*function, "strict", "other"])] = self.value()
        tool: dict[str, Any] = {"type": "function", "function": function}
        if self.random.random() < 0.1:
            tool[self.random.choice(["type", "function", "other"])] = self.value()
        return tool


class Wire:
    """One ASGI request: its body in pieces, perhaps broken off; what was answered."""

    def __init__(self, body: bytes, pieces: int, breaks: bool) -> None:
        size = max(1, len(body) // pieces + 1)
        parts = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
        self.events: list[dict[str, Any]] = [
            {"type": "http.request", "body": part, "more_body": True} for part in parts
        ]
        self.events[-1]["more_body"] = False
        if breaks:
            self.events[-1] = {"type": "http.disconnect"}
        self.status = 0
        self.answer = b""

    async def receive(self) -> dict[str, Any]:
        if self.events:
            return self.events.pop(0)
        await asyncio.Event().wait()
        raise AssertionError("never")

    async def send(self, event: dict[str, Any]) -> None:
        self.status = event.get("status", self.status)
        self.answer += event.get("body", b"")


def headers(hostile: Hostile, path: str) -> list[tuple[bytes, bytes]]:
    attempt = f"a{hostile.random.randrange(ATTEMPTS)}"
    key = (
        records_key(SECRET) if path.startswith("/side") else sign_attempt_key(SECRET, AttemptKey(attempt, "0.1", "r0"))
    )
    pick = hostile.random.random()
    found = [(b"authorization", b"Bearer " + (key.encode() if pick > 0.05 else hostile.random.randbytes(9)))]
    if pick > 0.9:
        found.append((b"idempotency-key", hostile.random.choice([b"k", b"", b"\xff", b"x" * 300])))
    return found


def test_hostile_requests_get_a_clear_answer_and_leave_nothing() -> None:
    async def main() -> None:
        hostile, engine = Hostile(1), FakeEngine()
        proxy = Proxy(CONFIG, SECRET, "r0", engine, ToyTokenizer())
        statuses: dict[int, int] = {}
        for number in range(REQUESTS):
            path, body = hostile.random.choice(PATHS), hostile.body()
            if path.startswith("/side"):  # not of the attempts that talk, or they would all be closed soon
                body = body if hostile.random.random() < 0.5 else b'{"attempt_id": "other"}'
            wire = Wire(body, hostile.random.randint(1, 3), hostile.random.random() < 0.05)
            scope = {
                "type": "http",
                "method": "POST",
                "path": path,
                "query_string": b"",
                "headers": headers(hostile, path),
            }
            async with asyncio.timeout(60):
                await proxy.app(scope, wire.receive, wire.send)  # type: ignore[arg-type]
            assert wire.status == 200 or 400 <= wire.status < 500, (number, wire.status, body[:500], wire.answer)
            if wire.status not in (200, 404, 405, 499):
                error = json.loads(wire.answer)["error"]
                assert error["code"] and error["message"] and len(error["message"]) < 2000, (number, error)
            statuses[wire.status] = statuses.get(wire.status, 0) + 1
        assert statuses[200] > REQUESTS / 50 and statuses[400] > REQUESTS / 10
        assert proxy.active_requests == 0
        await asyncio.sleep(0)
        gc.collect()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert len(proxy._calls._recorder) <= ATTEMPTS + 1
        assert not any(landings.running for landings in proxy._calls._landings._of.values())

    asyncio.run(main())
