"""Model calls: from a checked request to a recorded answer.

    land ─▶ a task (``landings.py``): wait for the gate ─▶ version ─▶ prompt ids ─▶ engine ─▶ tool calls parsed ─▶ recorded ─▶ Answer

Every call that came so far as to have a session is in the attempt's record, with how it ended; only a call whose answer was complete,
consistent and by an allowed version adds tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from hpcrl.clock import Clock
from hpcrl.config.schema import RunConfig
from hpcrl.errors import DataError, InfraError
from hpcrl.inference.answers import Answer, ApiError
from hpcrl.inference.command import SERVED_MODEL
from hpcrl.inference.landings import Landings
from hpcrl.inference.messages import canonical_call, size
from hpcrl.inference.openai import ChatRequest, CompletionRequest
from hpcrl.inference.recorder import RECORD_KEPT_S, Call, Recorder, Sampled, Session
from hpcrl.inference.supervisor import Generated
from hpcrl.inference.tokens import ChatTokenizer, Dialogue, Messages, PlainText, Prompts, Tools
from hpcrl.inference.toolcalls import Parsed, family_of, parse_reply
from hpcrl.protocol.clip import within
from hpcrl.protocol.keys import AttemptKey
from hpcrl.protocol.messages import Sampling
from hpcrl.protocol.record import Ending

__all__ = ["Arrived", "Calls", "Engine", "ReplyTokenizer", "Stats"]

_SETTLE_S = 2.0
_ENDINGS: dict[str, Ending] = {"stop": "stop", "length": "length"}
_CHARS_PER_TOKEN = 64
"""No request of so many characters per token of context can fit: it is neither rendered nor tokenised to find that out."""

Asked = ChatRequest | CompletionRequest


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
    """A chat tokenizer that also knows where replies end, its own chat template, and how many ids there are."""

    end_ids: frozenset[int]
    template: str
    vocabulary: int

    def content(self, token_ids: list[int]) -> str:
        """Readable text of a reply."""


@dataclass(slots=True)
class Stats:
    """Counters since the start."""

    requests: int = 0
    tokens_prompt: int = 0
    tokens_generated: int = 0
    endings: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A checked request and how it came. ``gone`` ends when the client has left; ``body`` is what an idempotency key stands for."""

    key: AttemptKey
    asked: Asked
    body: bytes
    idempotency_key: str | None
    gone: Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class _Wanted:
    asked: Asked
    prompts: Prompts
    messages: Messages
    tools: Tools | None
    role: str
    hopeless: bool
    """Far too long for the context, in whatever part."""


class Calls:
    """The calls of all attempts of one replica. Use from one event loop."""

    def __init__(
        self,
        config: RunConfig,
        replica_id: str,
        engine: Engine,
        tokenizer: ReplyTokenizer,
        clock: Clock,
        kept_s: float = RECORD_KEPT_S,
    ) -> None:
        self._config = config
        self._replica_id = replica_id
        self._engine = engine
        self._tokenizer = tokenizer
        self._stop_ids = sorted(tokenizer.end_ids)
        self._dialogue = Dialogue(tokenizer, tokenizer.end_ids)
        self._family = family_of(config.model.tool_calls, tokenizer.template)
        self._clock = clock
        self._recorder = Recorder(keep_s=kept_s, idle_s=4 * config.rollout.attempt_timeout_s)
        self._landings: Landings[Answer] = Landings()
        self._under_way: Counter[str] = Counter()
        self.generating = 0
        self.stats = Stats()

    @property
    def under_way(self) -> list[str]:
        """The attempts that have calls under way: waiting for the gate, or generating."""
        return list(self._under_way)

    async def land(self, arrived: Arrived) -> Answer | None:
        """The answer; None when nobody waits for it any more (the client left, or the attempt ended).

        Raises ApiError, InfraError, DataError, UserError.
        """
        asked, began_at = arrived.asked, self._clock.now()
        if asked.model not in ("", SERVED_MODEL):
            raise ApiError(
                404,
                "model_not_found",
                f"model {asked.model!r:.100} is not served; this run's model is {SERVED_MODEL!r}",
            )
        wanted = self._wanted(arrived)
        session = self._recorder.session(arrived.key.attempt_id, began_at)
        self.stats.requests += 1
        return await self._landings.land(
            session,
            arrived.idempotency_key,
            arrived.body,
            lambda: self._counted(session, arrived.key, wanted, began_at),
            arrived.gone(),
        )

    async def record(self, attempt_id: str) -> bytes:
        """End the attempt and give its record, an ``AttemptRecord`` as JSON. Raises ApiError(404), DataError."""
        session = self._recorder.find(attempt_id)
        if session is None:
            raise ApiError(
                404,
                "unknown_attempt",
                f"replica {self._replica_id} has no record of attempt {attempt_id:.200}: it made no "
                "call here, or the replica was restarted",
            )
        await self._settle(session)
        return session.record(self._clock.now())

    async def cancel(self, attempt_id: str) -> None:
        """End an attempt that is not wanted any more: what it generates is dropped, further calls are refused."""
        if self._recorder.is_over(attempt_id):
            return
        session = self._recorder.session(attempt_id, self._clock.now())
        session.cancel(self._clock.now())
        await self._settle(session)

    def _wanted(self, arrived: Arrived) -> _Wanted:
        asked, room = arrived.asked, _CHARS_PER_TOKEN * self._config.rollout.context_tokens
        if isinstance(asked, ChatRequest):
            messages = [self._within_budget(message) for message in asked.messages]
            hopeless = len(arrived.body) > room and size([messages, asked.tools]) > room
            return _Wanted(asked, self._dialogue, messages, asked.tools, "assistant", hopeless)
        ids = None if isinstance(asked.prompt, str) else asked.prompt
        text = asked.prompt if isinstance(asked.prompt, str) else self._decode(asked.prompt)
        prompts = PlainText(self._tokenizer, self._tokenizer.end_ids, ids)
        messages = [{"role": "prompt", "content": text}]
        return _Wanted(asked, prompts, messages, None, "completion", len(text) > room)

    async def _counted(self, session: Session, key: AttemptKey, wanted: _Wanted, began_at: float) -> Answer:
        attempt_id = key.attempt_id
        self._under_way[attempt_id] += 1
        try:
            return await self._call(session, key, wanted, began_at)
        finally:
            self._under_way[attempt_id] -= 1
            if not self._under_way[attempt_id]:
                del self._under_way[attempt_id]

    async def _call(self, session: Session, key: AttemptKey, wanted: _Wanted, began_at: float) -> Answer:
        asked = wanted.asked
        try:
            await self._engine.until_serving()
        except InfraError:
            self._note(session, asked.sampling, "queue_timeout", began_at)
            raise
        except asyncio.CancelledError:
            self._note(session, asked.sampling, "client_cancelled", began_at)
            raise
        version = self._version_for(key)
        context_tokens = self._config.rollout.context_tokens
        if wanted.hopeless:
            self._note(session, asked.sampling, "truncated", began_at)
            raise _no_room("the request is far too long", context_tokens)
        call = session.begin(
            wanted.prompts, wanted.messages, asked.sampling, self._clock.now(), began_at, wanted.tools, wanted.role
        )
        try:
            return await self._serve(session, call, asked, key, version)
        except asyncio.CancelledError:
            self._fail(session, call, "client_cancelled")
            raise
        except DataError as error:
            if call.ending is None:
                session.spoil(call, error, self._clock.now())
            raise
        finally:
            self._fail(session, call, "error")
            self._count(call)

    async def _serve(self, session: Session, call: Call, asked: Asked, key: AttemptKey, version: str) -> Answer:
        context_tokens, prompt = self._config.rollout.context_tokens, call.prompt_tokens
        room = context_tokens - prompt
        if room < 1:
            self._fail(session, call, "truncated")
            raise _no_room(f"the prompt has {prompt} tokens", context_tokens)
        call.sampling = asked.sampling.model_copy(update={"max_tokens": min(asked.sampling.max_tokens, room)})
        more = {**asked.extra, "stop": asked.stop} if asked.stop else asked.extra
        self.generating += 1
        call.generate_at = self._clock.now()
        try:
            generated = await self._engine.generate(
                version, call.prompt.token_ids, call.sampling, self._stop_ids, **more
            )
        except InfraError as error:
            self._fail(session, call, "generation_timeout" if error.reason == "generation_timeout" else "error")
            raise
        finally:
            self.generating -= 1
            call.generated_at = self._clock.now()
        if generated.finish_reason == "abort":
            self._fail(session, call, "abort")
            raise ApiError(
                409, "stale_version", "the generation was aborted because the replica changes its policy version"
            )
        if generated.finish_reason not in _ENDINGS:
            raise InfraError("engine_failed", f"vLLM ended the generation with {generated.finish_reason!r:.100}")
        refusal = _refusal(key, generated)
        if refusal is not None:
            self._fail(session, call, "abort")
            raise ApiError(409, "stale_version", refusal)
        return self._finish(session, call, generated, asked)

    def _finish(self, session: Session, call: Call, generated: Generated, asked: Asked) -> Answer:
        ids = generated.token_ids
        ended = bool(ids) and ids[-1] in self._tokenizer.end_ids
        kept = ids[:-1] if ended else ids
        sampled, ending = self._tokenizer.decode(kept), _ENDINGS[generated.finish_reason]
        parsed = Parsed(_cut(self._tokenizer.content(kept), asked.stop), [])
        if ending == "stop" and call.tools:
            found = parse_reply(self._family, _cut(sampled, asked.stop), call.request_id)
            if found.calls:
                parsed, ending = found, "tool_calls"
        spans = [(span.start, span.end, span.version) for span in generated.spans]
        calls = [canonical_call(one.id, one.name, one.arguments) for one in parsed.calls]
        now = self._clock.now()
        record = Sampled(ids, generated.logprobs, spans, parsed.content, calls, parsed.calls, sampled, generated.times)
        session.finish(call, record, ending, now)
        return Answer(
            call.request_id, SERVED_MODEL, parsed.content, ending, call.prompt_tokens, len(ids), now, parsed.calls
        )

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
        self._landings.cancel(session)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                while session.running:
                    await asyncio.sleep(0.005)

    def _within_budget(self, message: dict[str, Any]) -> dict[str, Any]:
        """A tool's result cut by the rule that sandboxes and our own harnesses use; anything else as it is."""
        if message["role"] != "tool":
            return message
        return {**message, "content": within(message["content"], self._config.sandbox.output_bytes)}

    def _decode(self, token_ids: list[int]) -> str:
        highest = max(token_ids)
        if highest >= self._tokenizer.vocabulary:
            raise ApiError(
                400,
                "invalid_value",
                f"prompt holds {highest}, but the model's ids end at {self._tokenizer.vocabulary - 1}",
            )
        # More of them than the context holds are refused later: their text is not needed.
        return self._tokenizer.decode(token_ids[: self._config.rollout.context_tokens])

    def _fail(self, session: Session, call: Call, ending: Ending) -> None:
        """End a call that has not ended yet."""
        if call.ending is None:
            session.fail(call, ending, self._clock.now())

    def _note(self, session: Session, sampling: Sampling, ending: Ending, began_at: float) -> None:
        self.stats.endings[ending] += 1
        session.note(sampling, ending, self._clock.now(), began_at)

    def _count(self, call: Call) -> None:
        stats = self.stats
        stats.endings[call.ending or "error"] += 1
        stats.tokens_prompt += call.prompt_tokens
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


def _no_room(what: str, context_tokens: int) -> ApiError:
    return ApiError(
        400,
        "context_length_exceeded",
        f"{what}, which leaves no room in rollout.context_tokens ({context_tokens})",
    )


def _cut(text: str, stop: list[str]) -> str:
    """The text before the first stop text."""
    found = [at for at in (text.find(mark) for mark in stop) if at >= 0]
    return text[: min(found)] if found else text
