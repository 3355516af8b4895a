"""The recording proxy: OpenAI's API for harnesses, a side channel for workers. The only way to the engine from outside.

    POST /v1/chat/completions   bearer: attempt key    one model call, recorded
    POST /v1/completions        bearer: attempt key    the same without a chat template
    GET  /v1/models             bearer: attempt key
    POST /side/record           bearer: records key    RecordRequest → AttemptRecord; closes the attempt, repeatable
    GET  /health                                       200 while calls are served

One call:

    parse ─▶ wait while a flip is under way ─▶ a version the key allows? ─▶ prompt ids ─▶ engine ─▶ record ─▶ answer
             503 queue_timeout                 409 stale_version    │           └── versions the key does not allow: 409
                                                                    └── no room: 400 context_length_exceeded
    └──────────────────────────── a task of ``landings.py``: dropped when its client goes or the attempt ends ───────┘

Which versions: ``AttemptKey.allows``; under ``pin: turn`` a reply is of one of them, under ``pin: token`` of any number. Which they are
says vLLM's own record, token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hpcrl.clock import Clock, SystemClock
from hpcrl.config.schema import RunConfig
from hpcrl.config.sections import RolloutSection
from hpcrl.errors import DataError, HpcrlError, InfraError, UserError
from hpcrl.inference.answers import (
    Answer,
    ApiError,
    chat_completion,
    chat_events,
    error_body,
    text_completion,
    text_events,
)
from hpcrl.inference.body import bearer, idempotency_key, read_body, read_json
from hpcrl.inference.calls import Arrived, Asked, Calls, Engine, ReplyTokenizer, Stats
from hpcrl.inference.command import SERVED_MODEL
from hpcrl.inference.openai import parse_chat, parse_completion
from hpcrl.inference.recorder import RECORD_KEPT_S
from hpcrl.protocol.keys import AttemptKey, read_attempt_key, records_key, same_key
from hpcrl.protocol.record import RecordRequest

__all__ = ["Engine", "Proxy", "ReplyTokenizer", "Stats"]

_CLIENT_CLOSED = 499
_SERVED = "for a harness there are POST /v1/chat/completions, POST /v1/completions and GET /v1/models"


class Proxy:
    """The ASGI application of one replica (``app``), its sessions and counters. Use from one event loop.

    ``kept_s``: how long a taken record can be taken again.
    """

    def __init__(
        self,
        config: RunConfig,
        secret: str,
        replica_id: str,
        engine: Engine,
        tokenizer: ReplyTokenizer,
        clock: Clock | None = None,
        kept_s: float = RECORD_KEPT_S,
    ) -> None:
        self._rollout = config.rollout
        self._secret = secret
        self._records_key = records_key(secret)
        self._replica_id = replica_id
        self._engine = engine
        self._calls = Calls(config, replica_id, engine, tokenizer, clock or SystemClock(), kept_s)
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/side/record", self._record, methods=["POST"]),
                Route("/health", self._health),
            ],
            exception_handlers={
                HpcrlError: _answer_error,
                ClientDisconnect: _nobody_there,
                HTTPException: _no_such_route,
            },
        )

    @property
    def active_requests(self) -> int:
        """Generations under way."""
        return self._calls.generating

    @property
    def attempts_under_way(self) -> list[str]:
        """The attempts that have calls under way."""
        return self._calls.under_way

    @property
    def stats(self) -> Stats:
        """Counters since the start."""
        return self._calls.stats

    async def cancel(self, attempt_id: str) -> None:
        """End an attempt that is not wanted any more: what it generates is dropped, further calls are refused."""
        await self._calls.cancel(attempt_id)

    # ------------------------------------------------------------ routes

    async def _chat(self, request: Request) -> Response:
        return await self._call(request, parse_chat, chat_completion, chat_events)

    async def _complete(self, request: Request) -> Response:
        return await self._call(request, parse_completion, text_completion, text_events)

    async def _call(
        self,
        request: Request,
        parse: Callable[[Any, RolloutSection], Asked],
        whole: Callable[[Answer], dict[str, Any]],
        events: Callable[[Answer, bool], bytes],
    ) -> Response:
        """One model call of either dialect, answered as one body or as events."""
        key, body = self._attempt_key(request), await read_body(request)
        asked = parse(read_json(body), self._rollout)
        answer = await self._answer(request, key, body, asked)
        if answer is None:
            return Response(status_code=_CLIENT_CLOSED)
        if asked.stream:
            return Response(events(answer, asked.include_usage), media_type="text/event-stream")
        return JSONResponse(whole(answer))

    async def _answer(self, request: Request, key: AttemptKey, body: bytes, asked: Asked) -> Answer | None:
        arrived = Arrived(
            key=key,
            asked=asked,
            body=request.url.path.encode() + b"\n" + body,
            idempotency_key=idempotency_key(request),
            gone=lambda: _disconnected(request),
        )
        return await self._calls.land(arrived)

    async def _models(self, request: Request) -> Response:
        self._attempt_key(request)
        model = {"id": SERVED_MODEL, "object": "model", "created": 0, "owned_by": "hpcrl"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _health(self, request: Request) -> Response:
        await self._engine.until_serving()
        return JSONResponse({"status": "serving", "version": self._engine.served_version})

    async def _record(self, request: Request) -> Response:
        record = await self._calls.record(await self._side_request(request))
        return Response(record, media_type="application/json")

    # ------------------------------------------------------------ small parts

    def _attempt_key(self, request: Request) -> AttemptKey:
        key = read_attempt_key(self._secret, bearer(request))
        if key is None:
            raise ApiError(401, "bad_key", "the bearer key was not issued by this run")
        if key.replica_id != self._replica_id:
            raise ApiError(403, "wrong_replica", f"the key is for replica {key.replica_id}, this is {self._replica_id}")
        return key

    async def _side_request(self, request: Request) -> str:
        """The attempt that a worker speaks of."""
        if not same_key(bearer(request), self._records_key):
            raise ApiError(401, "bad_key", "the side channel needs the worker role's key")
        try:
            return RecordRequest.model_validate(read_json(await read_body(request))).attempt_id
        except ValidationError as error:
            raise ApiError(400, "invalid_request", f"not a RecordRequest: {error!s:.300}") from error


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _nobody_there(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED)


async def _no_such_route(request: Request, error: Exception) -> Response:
    """Another path or method; ``error`` is starlette's."""
    status, headers = (error.status_code, error.headers) if isinstance(error, HTTPException) else (404, None)
    what = f"{request.method:.20} {request.url.path:.100} is not served; {_SERVED}"
    return JSONResponse(error_body("unknown_route", what, status), status_code=status, headers=headers)


async def _answer_error(request: Request, error: Exception) -> Response:
    """The one place where errors become answers."""
    if isinstance(error, ApiError):
        status, code = error.status, error.code
    elif isinstance(error, InfraError):
        status, code = (409 if error.reason == "attempt_closed" else 503), error.reason
    elif isinstance(error, DataError):
        status, code = 422, error.reason
    elif isinstance(error, UserError):
        status, code = 400, "invalid_messages"
    else:
        status, code = 500, "internal"
    return JSONResponse(error_body(code, str(error), status), status_code=status)
