"""What was really sampled, per attempt. Pure: time is passed in.

    first call ──▶ open ──▶ call begins ──▶ call ends (tokens added, or only its ending noted) ──▶ … ──▶ record() ──▶ closed
                     │                                                                                       │
                     └── nothing for ``idle_s`` ─────────────────▶ released ◀── ``keep_s`` after closing ────┘

An attempt may have several contexts at once (the harness summarised, or runs a sub-agent): each becomes a segment of the record. A
context that a running call extends is not offered to another call, which then begins a context of its own: no token appears twice
as sampled, none is invented. A call that opens a segment says why (``RequestRecord.opens``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from hpcrl.errors import DataError, InfraError
from hpcrl.inference.tokens import Context, Messages, Prompt, Prompts, Tools
from hpcrl.protocol.messages import Sampling
from hpcrl.protocol.record import AttemptRecord, CalledTool, Ending, EngineTimes, Opens, RequestRecord, VersionSpan

__all__ = ["RECORD_KEPT_S", "Call", "Recorder", "Sampled", "Session"]

RECORD_KEPT_S = 300.0
"""How long a taken record can be taken again."""
_OPEN_CONTEXTS = 8
"""Contexts looked at for an extension, latest first."""
_REMEMBERED = 20_000
"""Released attempts that are still known to be over."""
_NOTHING = Prompt([], [], "", False)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampled part of a call; ``spans`` are (start, end, version) within it, ``reply`` the text that was returned.

    ``tool_calls`` are those of the returned message, in its canonical form; ``text`` is what was sampled, without its end token.
    """

    token_ids: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int, str]]
    reply: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    called: list[CalledTool] = field(default_factory=list)
    text: str | None = None
    times: EngineTimes | None = None


@dataclass(slots=True)
class _Segment:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    spans: list[tuple[int, int, str]] = field(default_factory=list)
    context: Context | None = None
    busy: bool = False

    def add_prompt(self, token_ids: list[int]) -> None:
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.loss_mask += [0] * len(token_ids)

    def add_sampled(self, sampled: Sampled) -> tuple[int, int]:
        start = len(self.token_ids)
        self.token_ids += sampled.token_ids
        self.logprobs += sampled.logprobs
        self.loss_mask += [1] * len(sampled.token_ids)
        self.spans += [(start + first, start + last, version) for first, last, version in sampled.spans]
        return start, len(self.token_ids)


@dataclass(slots=True)
class Call:
    """One running or finished request of a session; ``messages`` and ``prompt`` are there while it runs: each is a whole dialogue."""

    request_id: str
    messages: Messages
    prompt: Prompt
    prompt_tokens: int
    sampling: Sampling
    began_at: float
    generate_at: float
    """When the engine was asked; before that, when the prompt was built."""
    segment: _Segment
    opens: Opens | None = None
    tools: Tools | None = None
    role: str = "assistant"
    called: list[CalledTool] = field(default_factory=list)
    ending: Ending | None = None
    start: int = 0
    end: int = 0
    ended_at: float = 0.0
    generated_at: float | None = None
    times: EngineTimes | None = None


class Session:
    """The contexts and calls of one attempt; ``running`` counts the calls under way."""

    def __init__(self, attempt_id: str, now: float) -> None:
        self.attempt_id = attempt_id
        self.touched_at = now
        self.running = 0
        self._segments: list[_Segment] = []
        self._calls: list[Call] = []
        self._last_messages: Messages = []
        self._failure: DataError | None = None
        self._cancelled = False
        self._record: bytes | None = None

    @property
    def closed(self) -> bool:
        """Whether the record was taken or the attempt cancelled: no further calls."""
        return self._record is not None or self._cancelled

    def begin(
        self,
        prompts: Prompts,
        messages: Messages,
        sampling: Sampling,
        now: float,
        began_at: float,
        tools: Tools | None = None,
        role: str = "assistant",
    ) -> Call:
        """Find the prompt of a call; ``role`` is that of the reply. Every call begun must be ended once, by :meth:`finish`,
        :meth:`spoil` or :meth:`fail`.

        Raises InfraError("attempt_closed") after the record was taken, UserError when the template refuses the messages.
        """
        if self.closed:
            raise InfraError(
                "attempt_closed", f"attempt {self.attempt_id} was cancelled, or its record was taken: it is over"
            )
        text = prompts.render(messages, tools)
        segment, prompt, opens = self._extension(prompts, messages, text, tools)
        segment.busy = True
        tokens = len(prompt.token_ids)
        call = Call(self._next_id(), messages, prompt, tokens, sampling, began_at, now, segment, opens, tools, role)
        self._calls.append(call)
        self.running += 1
        self.touched_at = now
        return call

    def note(self, sampling: Sampling, ending: Ending, now: float, began_at: float) -> None:
        """Record a call that ended before it had a prompt. After the record was taken there is nothing to note."""
        if self._record is None:
            empty = Call(self._next_id(), [], _NOTHING, 0, sampling, began_at, now, _Segment())
            empty.ending, empty.ended_at = ending, now
            self._calls.append(empty)
            self.touched_at = now

    def finish(self, call: Call, sampled: Sampled, ending: Ending, now: float) -> None:
        """Add what a call sampled. Raises DataError (also later, from :meth:`record`) when it is not consistent."""
        try:
            _check(sampled)
        except DataError as error:
            self.spoil(call, error, now)
            raise
        segment, prompt, asked = call.segment, call.prompt, call.messages
        self.fail(call, ending, now)
        if not segment.token_ids:
            self._segments.append(segment)
        segment.add_prompt(prompt.delta)
        call.start, call.end = segment.add_sampled(sampled)
        call.called, call.times = sampled.called, sampled.times
        reply: dict[str, Any] = {"role": call.role, "content": sampled.reply}
        if sampled.tool_calls:
            reply["tool_calls"] = sampled.tool_calls
        messages = [*asked, reply]
        segment.context = Context(segment.token_ids, prompt.text, messages, call.tools, sampled.text)
        self._last_messages = messages

    def spoil(self, call: Call, error: DataError, now: float) -> None:
        """End a call whose tokens are not known exactly: the attempt has no record, :meth:`record` raises ``error``."""
        self._failure = error
        self.fail(call, "error", now)

    def fail(self, call: Call, ending: Ending, now: float) -> None:
        """End a call that adds no tokens."""
        self.running -= 1
        call.ending, call.ended_at = ending, now
        call.messages, call.prompt = [], _NOTHING
        call.segment.busy = False
        self.touched_at = now

    def cancel(self, now: float) -> None:
        """The attempt is not wanted any more: no further calls. What it sampled can still be looked at."""
        self._cancelled = True
        self.touched_at = now

    def record(self, now: float) -> bytes:
        """Close the session and return all of it, an ``AttemptRecord`` as JSON; the same answer each time.

        Raises DataError when it is not complete.
        """
        if self._failure is not None:
            raise self._failure
        if self._record is None:
            if self.running:
                raise DataError("calls_running", f"attempt {self.attempt_id} has {self.running} model calls under way")
            self._record = self._build().model_dump_json().encode()
            self.touched_at = now
            # The record is all that is asked for from here on; as objects it would be three times as large.
            self._segments, self._calls, self._last_messages = [], [], []
        return self._record

    def _next_id(self) -> str:
        return f"{self.attempt_id}-q{len(self._calls)}"

    def _extension(
        self, prompts: Prompts, messages: Messages, text: str, tools: Tools | None
    ) -> tuple[_Segment, Prompt, Opens | None]:
        """The segment that the call continues and its prompt; or a new segment, and why."""
        opens: Opens = "history" if self._segments else "first"
        for segment in self._segments[: -_OPEN_CONTEXTS - 1 : -1]:
            if segment.context is None or not prompts.continues(segment.context, messages, tools):
                continue
            if segment.busy:
                opens = "parallel"
                continue
            prompt = prompts.extend(segment.context, messages, text, tools)
            if prompt is not None:
                return segment, prompt, None
            opens = "template"
        return _Segment(), prompts.begin(text), opens

    def _build(self) -> AttemptRecord:
        offsets: list[int] = []
        token_ids: list[int] = []
        logprobs: list[float] = []
        loss_mask: list[int] = []
        spans: list[VersionSpan] = []
        for segment in self._segments:
            offset = len(token_ids)
            offsets.append(offset)
            token_ids += segment.token_ids
            logprobs += segment.logprobs
            loss_mask += segment.loss_mask
            spans += [VersionSpan(start=offset + a, end=offset + b, version=v) for a, b, v in segment.spans]
        places = {id(segment): index for index, segment in enumerate(self._segments)}
        return AttemptRecord(
            attempt_id=self.attempt_id,
            token_ids=token_ids,
            logprobs=logprobs,
            loss_mask=loss_mask,
            segments=offsets,
            version_spans=spans,
            requests=[self._request(call, places, offsets) for call in self._calls],
            messages=self._last_messages,
        )

    def _request(self, call: Call, places: dict[int, int], offsets: list[int]) -> RequestRecord:
        # A call without tokens of its own, in a context that never came to be, stands at the start of the last segment.
        index = places.get(id(call.segment), max(len(offsets) - 1, 0))
        offset = offsets[index] if offsets else 0
        return RequestRecord(
            request_id=call.request_id,
            segment=index,
            prompt_tokens=call.prompt_tokens,
            start=offset + call.start,
            end=offset + call.end,
            ending=call.ending or "error",
            sampling=call.sampling,
            started_at=call.began_at,
            queue_s=max(call.generate_at - call.began_at, 0.0),
            generate_s=max((call.generated_at or call.ended_at) - call.generate_at, 0.0),
            engine=call.times,
            opens=call.opens if call.end > call.start else None,
            tool_calls=call.called,
        )


class Recorder:
    """The sessions of one replica; memory is bounded by releasing closed and abandoned ones."""

    def __init__(self, *, keep_s: float = RECORD_KEPT_S, idle_s: float = 3600.0) -> None:
        self._keep_s = keep_s
        self._idle_s = idle_s
        self._sessions: dict[str, Session] = {}
        self._over: dict[str, None] = {}
        self._released_at = -math.inf

    def __len__(self) -> int:
        return len(self._sessions)

    def session(self, attempt_id: str, now: float) -> Session:
        """The attempt's session, opened at its first call. Raises InfraError("attempt_closed") when it was released."""
        found = self._sessions.get(attempt_id)
        if found is None:
            if self.is_over(attempt_id):
                raise InfraError("attempt_closed", f"attempt {attempt_id} is over since long")
            self._release(now)
            found = self._sessions[attempt_id] = Session(attempt_id, now)
        return found

    def find(self, attempt_id: str) -> Session | None:
        """The attempt's session, or None when it never called, or was released."""
        return self._sessions.get(attempt_id)

    def is_over(self, attempt_id: str) -> bool:
        """Whether the attempt had a session that was released."""
        return attempt_id in self._over

    def _release(self, now: float) -> None:
        if now - self._released_at < self._keep_s / 10:
            return
        self._released_at = now
        for attempt_id, session in list(self._sessions.items()):
            limit = self._keep_s if session.closed else self._idle_s
            if not session.running and now - session.touched_at > limit:
                del self._sessions[attempt_id]
                self._over[attempt_id] = None
        for attempt_id in list(self._over)[: max(0, len(self._over) - _REMEMBERED)]:
            del self._over[attempt_id]


def _check(sampled: Sampled) -> None:
    count = len(sampled.token_ids)
    if len(sampled.logprobs) != count:
        raise DataError("record", f"{count} sampled tokens but {len(sampled.logprobs)} logprobs")
    if not all(math.isfinite(value) for value in sampled.logprobs):
        raise DataError("record", "a sampled token has no finite logprob")
    covered = 0
    for start, end, _ in sampled.spans:
        if start != covered or end < start:
            raise DataError("record", f"version spans {sampled.spans} do not cover {count} tokens in order")
        covered = end
    if covered != count:
        raise DataError("record", f"version spans cover {covered} of {count} sampled tokens")
