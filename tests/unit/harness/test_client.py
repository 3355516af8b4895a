"""The client against a real local HTTP server (aiohttp's own), so that headers, bodies and broken connections are real."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web

from hpcrl.errors import InfraError
from hpcrl.harness.client import ChatClient, ContextExceeded, Reply

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def complete(handler: Handler, timeout_s: float = 5.0) -> Reply:
    async def main() -> Reply:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            async with aiohttp.ClientSession() as session:
                client = ChatClient(session, f"http://{host}:{port}/v1", "sk-key", max_tokens=56)
                return await client.complete([{"role": "user", "content": "é"}], timeout_s)
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def answer(status: int, body: object) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body if isinstance(body, bytes) else json.dumps(body).encode())

    return handler


def chat(content: str | None, finish_reason: str) -> dict[str, object]:
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}
    return {"id": "req-1", "choices": [choice]}


def test_a_good_reply_and_what_was_sent() -> None:
    seen: dict[str, object] = {}

    async def handler(request: web.Request) -> web.Response:
        seen.update(await request.json())
        seen["key"] = request.headers["Authorization"]
        return web.json_response(chat("hé", "stop"))

    assert complete(handler) == Reply("hé", "stop", "req-1")
    assert seen["key"] == "Bearer sk-key" and seen["max_tokens"] == 56
    assert seen["messages"] == [{"role": "user", "content": "é"}]


def test_missing_content_is_empty_text() -> None:
    assert complete(answer(200, chat(None, "length"))).text == ""


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (409, {"error": {"code": "stale_version", "message": "0.3 ≠ 0.4"}}, "stale_version"),
        (401, {"error": {"message": "bad key"}}, "model_key_refused"),
        (400, {"error": {"code": "unknown_parameter", "message": "n"}}, "model_request_refused"),
        (500, b"oops", "model_unavailable"),
        (503, {"error": None}, "model_unavailable"),
        (429, [], "model_unavailable"),
        (200, b"<html>", "model_reply_invalid"),
        (200, {"choices": []}, "model_reply_invalid"),
        (200, chat("half", "abort"), "generation_aborted"),
        (200, chat("x", "surprise"), "model_reply_invalid"),
    ],
)
def test_failures_are_typed(status: int, body: object, reason: str) -> None:
    with pytest.raises(InfraError) as caught:
        complete(answer(status, body))
    assert caught.value.reason == reason


def test_full_context_is_not_an_infrastructure_failure() -> None:
    with pytest.raises(ContextExceeded):
        complete(answer(400, {"error": {"code": "context_length_exceeded", "message": "321 > 320"}}))


def test_slow_and_broken_servers() -> None:
    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(1)
        return web.Response()

    async def broken(request: web.Request) -> web.Response:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    with pytest.raises(InfraError, match="model_timeout"):
        complete(slow, timeout_s=0.05)
    with pytest.raises(InfraError, match="model_connection"):
        complete(broken)
