"""A stand-in for an inference replica: OpenAI chat completions from a script, and the side channel. Tokens are UTF-8 bytes."""

from __future__ import annotations

import asyncio
import hmac
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from hpcrl.protocol.keys import AttemptKey, read_attempt_key, records_key
from hpcrl.protocol.messages import Sampling
from hpcrl.protocol.record import AttemptRecord, RequestRecord, VersionSpan

__all__ = ["FakeReplica", "Fault", "Script"]

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Fault:
    """An answer that is no reply. ``hang_s`` delays it."""

    status: int = 500
    code: str = ""
    hang_s: float = 0.0


Script = Callable[[AttemptKey, Messages], str | Fault]
"""What the model says to a conversation of an attempt."""


@dataclass
class _Session:
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    seen: int = 0
    messages: Messages = field(default_factory=list)


class FakeReplica:
    """Serves in a thread of its own: ``with FakeReplica(secret, "r0", script) as replica: replica.base_url``."""

    def __init__(self, secret: str, replica_id: str, script: Script) -> None:
        self.replica_id = replica_id
        self.script = script
        self.calls = 0
        self.spoiled: Callable[[AttemptRecord], AttemptRecord] = lambda record: record
        self.base_url = ""
        self._secret = secret
        self._sessions: dict[str, _Session] = {}
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)

    def __enter__(self) -> FakeReplica:
        self._thread.start()
        if not self._ready.wait(10):
            raise RuntimeError("the fake replica did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/side/record", self._record)
        runner = web.AppRunner(app)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
        host, port = runner.addresses[0][:2]
        self.base_url = f"http://{host}:{port}/v1"
        self._ready.set()
        self._loop.run_forever()

    async def _chat(self, request: web.Request) -> web.Response:
        self.calls += 1
        key = read_attempt_key(self._secret, request.headers["Authorization"].removeprefix("Bearer "))
        if key is None:
            return web.json_response({"error": {"message": "bad key"}}, status=401)
        messages = (await request.json())["messages"]
        answer = self.script(key, messages)
        if isinstance(answer, Fault):
            await asyncio.sleep(answer.hang_s)
            return web.json_response({"error": {"code": answer.code, "message": "scripted"}}, status=answer.status)
        request_id = self._remember(key, messages, answer)
        choice = {"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
        return web.json_response({"id": request_id, "object": "chat.completion", "choices": [choice]})

    def _remember(self, key: AttemptKey, messages: Messages, answer: str) -> str:
        session = self._sessions.setdefault(key.attempt_id, _Session())
        prompt = "".join(message["content"] + "\n" for message in messages[session.seen :]).encode()
        session.token_ids += prompt
        session.loss_mask += [0] * len(prompt)
        start, sampled = len(session.token_ids), answer.encode()
        session.token_ids += sampled
        session.loss_mask += [1] * len(sampled)
        session.seen = len(messages) + 1
        session.messages = [*messages, {"role": "assistant", "content": answer}]
        request_id = f"{key.attempt_id}-{len(session.requests)}"
        end = len(session.token_ids)
        session.spans.append(VersionSpan(start=start, end=end, version=key.policy_version))
        session.requests.append(
            RequestRecord(
                request_id=request_id,
                segment=0,
                prompt_tokens=start,
                start=start,
                end=end,
                ending="stop",
                sampling=Sampling(),
                started_at=time.time(),
                queue_s=0.0,
                generate_s=0.0,
            )
        )
        return request_id

    async def _record(self, request: web.Request) -> web.Response:
        given = request.headers["Authorization"].removeprefix("Bearer ")
        if not hmac.compare_digest(given, records_key(self._secret)):
            return web.json_response({"error": {"message": "bad key"}}, status=401)
        attempt_id = (await request.json())["attempt_id"]
        session = self._sessions.get(attempt_id)
        if session is None:
            return web.json_response({"error": {"message": "no such attempt"}}, status=404)
        record = AttemptRecord(
            attempt_id=attempt_id,
            token_ids=session.token_ids,
            logprobs=[-0.5 * bit for bit in session.loss_mask],
            loss_mask=session.loss_mask,
            segments=[0],
            version_spans=session.spans,
            requests=session.requests,
            messages=session.messages,
        )
        return web.json_response(text=self.spoiled(record).model_dump_json())
