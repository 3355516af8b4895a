"""The recording proxy: OpenAI's chat API for harnesses, a side channel for workers. The only way to the engine from outside.

    POST /v1/chat/completions   bearer: attempt key    one model call, recorded
    GET  /v1/models             bearer: attempt key
    POST /side/record           bearer: records key    RecordRequest → AttemptRecord; closes the attempt, repeatable
    GET  /health                                       200 while calls are served

One call:

    parse ─▶ wait while a flip is under way ─▶ a version the key allows? ─▶ prompt ids ─▶ engine ─▶ record ─▶ answer
             503 queue_timeout                 409 stale_version    │           ├── client gone: engine call dropped
                                                                    │           └── versions the key does not allow: 409
                                                                    └── no room: 400 context_length_exceeded

Which versions: ``AttemptKey.allows``; under ``pin: turn`` a reply is of one of them, under ``pin: token`` of any number. Which they are
says vLLM's own record, token by token.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hpcrl.clock import Clock, SystemClock
from hpcrl.config.schema import RunConfig
from hpcrl.errors import DataError, HpcrlError, InfraError, UserError
from hpcrl.inference.command import SERVED_MODEL
from hpcrl.inference.openai import ApiError, ChatRequest, completion, error_body, parse_chat
from hpcrl.inference.recorder import Call, Recorder, Sampled, Session
from hpcrl.inference.supervisor import Generated
from hpcrl.inference.tokens import ChatTokenizer, Dialogue
from hpcrl.protocol.keys import AttemptKey, read_attempt_key, records_key, same_key
from hpcrl.protocol.messages import Sampling
from hpcrl.protocol.record import Ending, RecordRequest

__all__ = ["Engine", "Proxy", "ReplyTokenizer", "Stats"]

_SETTLE_S = 2.0
_CLIENT_CLOSED = 499
_ENDINGS: dict[str, Ending] = {"stop": "stop", "length": "length", "abort": "abort"}


class Engine(Protocol):
    """What the proxy needs of a replica."""

    @property
    def served_version(self) -> str | None:
        """The version that new attempts meet; None before there is one."""

    async def until_serving(self) -> None:
        """Wait a short while for a flip or a restart. Raises InfraError("queue_timeout")."""

    def version_for(self, key: AttemptKey) -> str | None:
        """The version that may answer the attempt now; None: none that is served here."""

    async def generate(
        self, version: str, token_ids: list[int], sampling: Sampling, stop_token_ids: list[int], **more: Any
    ) -> Generated:
        """Sample a continuation where ``version`` is served; cancelling aborts it. Raises InfraError, DataError."""


class ReplyTokenizer(ChatTokenizer, Protocol):
    """A chat tokenizer that also knows where replies end."""

    end_ids: frozenset[int]

    def content(self, token_ids: list[int]) -> str:
        """Readable text of a reply."""


@dataclass(slots=True)
class Stats:
    """Counters since the start."""

    requests: int = 0
    tokens_prompt: int = 0
    tokens_generated: int = 0
    endings: Counter[str] = field(default_factory=Counter)


class Proxy:
    """The ASGI application of one replica (``app``), its sessions and counters. Use from one event loop."""

    def __init__(
        self,
        config: RunConfig,
        secret: str,
        replica_id: str,
        engine: Engine,
        tokenizer: ReplyTokenizer,
        clock: Clock | None = None,
    ) -> None:
        self._config = config
        self._secret = secret
        self._records_key = records_key(secret)
        self._replica_id = replica_id
        self._engine = engine
        self._tokenizer = tokenizer
        self._stop_ids = sorted(tokenizer.end_ids)
        self._dialogue = Dialogue(tokenizer, tokenizer.end_ids)
        self._clock = clock or SystemClock()
        self._recorder = Recorder(idle_s=4 * config.rollout.attempt_timeout_s)
        self._generations: dict[str, set[asyncio.Task[Generated]]] = {}
        self.stats = Stats()
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/side/record", self._record, methods=["POST"]),
                Route("/health", self._health),
            ],
            exception_handlers={HpcrlError: _answer_error},
        )

    @property
    def active_requests(self) -> int:
        """Generations under way."""
        return sum(len(tasks) for tasks in self._generations.values())

    # ------------------------------------------------------------ routes

    async def _chat(self, request: Request) -> Response:
        began_at = self._clock.now()
        key = self._attempt_key(request)
        chat = parse_chat(await _json(request), self._config.rollout)
        if chat.model not in ("", SERVED_MODEL):
            raise ApiError(
                404, "model_not_found", f"model {chat.model!r} is not served; this run's model is {SERVED_MODEL!r}"
            )
        self.stats.requests += 1
        try:
            await self._engine.until_serving()
        except InfraError:
            self.stats.endings["queue_timeout"] += 1
            raise
        version = self._version_for(key)
        session = self._recorder.session(key.attempt_id, self._clock.now())
        call = session.begin(self._dialogue, chat.messages, chat.sampling, self._clock.now(), began_at)
        try:
            return await self._serve(request, session, call, chat, key, version)
        finally:
            if call.ending is None:
                session.fail(call, "error", self._clock.now())
            self._count(call)

    async def _models(self, request: Request) -> Response:
        self._attempt_key(request)
        model = {"id": SERVED_MODEL, "object": "model", "created": 0, "owned_by": "hpcrl"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _health(self, request: Request) -> Response:
        await self._engine.until_serving()
        return JSONResponse({"status": "serving", "version": self._engine.served_version})

    async def _record(self, request: Request) -> Response:
        if not same_key(_bearer(request), self._records_key):
            raise ApiError(401, "bad_key", "the side channel needs the worker role's key")
        try:
            attempt_id = RecordRequest.model_validate(await _json(request)).attempt_id
        except ValidationError as error:
            raise ApiError(400, "invalid_request", f"not a RecordRequest: {error}") from error
        session = self._recorder.find(attempt_id)
        if session is None:
            raise ApiError(
                404,
                "unknown_attempt",
                f"replica {self._replica_id} has no record of attempt {attempt_id}: it made no "
                "call here, or the replica was restarted",
            )
        await self._settle(session)
        return Response(session.record(self._clock.now()).model_dump_json(), media_type="application/json")

    # ------------------------------------------------------------ one call

    async def _serve(
        self, request: Request, session: Session, call: Call, chat: ChatRequest, key: AttemptKey, version: str
    ) -> Response:
        room = self._config.rollout.context_tokens - len(call.prompt.token_ids)
        if room < 1:
            raise ApiError(
                400,
                "context_length_exceeded",
                f"the prompt has {len(call.prompt.token_ids)} tokens, which leaves no room in rollout.context_tokens "
                f"({self._config.rollout.context_tokens})",
            )
        call.sampling = chat.sampling.model_copy(update={"max_tokens": min(chat.sampling.max_tokens, room)})
        more = {**chat.extra, "stop": chat.stop} if chat.stop else chat.extra
        try:
            generated = await self._generate(request, session, call, version, more)
        except InfraError as error:
            timed_out = error.reason == "generation_timeout"
            session.fail(call, "generation_timeout" if timed_out else "error", self._clock.now())
            raise
        if generated is None:
            session.fail(call, "client_cancelled", self._clock.now())
            return Response(status_code=_CLIENT_CLOSED)
        if generated.finish_reason not in ("stop", "length"):
            session.fail(call, _ENDINGS.get(generated.finish_reason, "error"), self._clock.now())
            raise ApiError(
                409, "stale_version", "the generation was aborted because the replica changes its policy version"
            )
        refusal = _refusal(key, generated)
        if refusal is not None:
            session.fail(call, "abort", self._clock.now())
            raise ApiError(409, "stale_version", refusal)
        return self._finish(session, call, generated, chat.stop)

    async def _generate(
        self, request: Request, session: Session, call: Call, version: str, more: dict[str, Any]
    ) -> Generated | None:
        """The engine's answer, or None when the client (or the end of the attempt) cancelled it."""
        generation = asyncio.ensure_future(
            self._engine.generate(version, call.prompt.token_ids, call.sampling, self._stop_ids, **more)
        )
        running = self._generations.setdefault(session.attempt_id, set())
        running.add(generation)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((generation, gone), return_when=asyncio.FIRST_COMPLETED)
            if not generation.done() or generation.cancelled():
                return None
            return generation.result()
        finally:
            gone.cancel()
            generation.cancel()
            running.discard(generation)
            if not running:
                self._generations.pop(session.attempt_id, None)

    def _finish(self, session: Session, call: Call, generated: Generated, stop: list[str]) -> Response:
        ids = generated.token_ids
        ended = bool(ids) and ids[-1] in self._tokenizer.end_ids
        reply = _cut(self._tokenizer.content(ids[:-1] if ended else ids), stop)
        spans = [(span.start, span.end, span.version) for span in generated.spans]
        ending = _ENDINGS[generated.finish_reason]
        now = self._clock.now()
        session.finish(call, Sampled(ids, generated.logprobs, spans, reply), ending, now)
        body = completion(call.request_id, SERVED_MODEL, reply, ending, len(call.prompt.token_ids), len(ids), now)
        return JSONResponse(body)

    # ------------------------------------------------------------ small parts

    def _attempt_key(self, request: Request) -> AttemptKey:
        key = read_attempt_key(self._secret, _bearer(request))
        if key is None:
            raise ApiError(401, "bad_key", "the bearer key was not issued by this run")
        if key.replica_id != self._replica_id:
            raise ApiError(403, "wrong_replica", f"the key is for replica {key.replica_id}, this is {self._replica_id}")
        return key

    def _version_for(self, key: AttemptKey) -> str:
        version = self._engine.version_for(key)
        if version is None:
            raise ApiError(
                409,
                "stale_version",
                f"the attempt is bound to version {key.policy_version}, this replica serves {self._engine.served_version}",
            )
        return version

    async def _settle(self, session: Session) -> None:
        """The attempt is over: drop what it still generates, and wait until that is noted."""
        for generation in self._generations.get(session.attempt_id, ()):
            generation.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                while session.running:
                    await asyncio.sleep(0.005)

    def _count(self, call: Call) -> None:
        stats = self.stats
        stats.endings[call.ending or "error"] += 1
        stats.tokens_prompt += len(call.prompt.token_ids)
        stats.tokens_generated += call.end - call.start


def _refusal(key: AttemptKey, generated: Generated) -> str | None:
    """Why a reply may not become part of the attempt, or None."""
    for span in generated.spans:
        if not key.allows(span.version):
            later = "" if key.pin == "trajectory" else " or later"
            return f"sampled by {span.version}, but the attempt is bound to {key.policy_version}{later}"
    if key.pin == "turn" and len({span.version for span in generated.spans}) > 1:
        return "sampled by more than one version, but weights.pin is turn: one per model call"
    return None


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _json(request: Request) -> Any:
    try:
        return json.loads(await request.body())
    except ValueError as error:
        raise ApiError(400, "invalid_request", f"the body is not JSON: {error}") from error


def _bearer(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _cut(text: str, stop: list[str]) -> str:
    """The text before the first stop text."""
    found = [at for at in (text.find(mark) for mark in stop) if at >= 0]
    return text[: min(found)] if found else text


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
