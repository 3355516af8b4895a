"""What the recording proxy knows of one attempt: the side channel. None of it ever appears in a chat message.

The attempt's tokens are one flat sequence made of *segments*. A segment is one context the model really saw: its first request's
prompt, then sampled tokens and later turns' delta in order. A new segment starts when the harness (or the template) rewrote history.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from hpcrl.protocol.messages import Message, Sampling

__all__ = [
    "MALFORMED_TOOL_CALL",
    "AttemptRecord",
    "CalledTool",
    "Ending",
    "EngineTimes",
    "Opens",
    "RecordRequest",
    "RequestRecord",
    "VersionSpan",
]

Ending = Literal[
    "stop",
    "tool_calls",
    "length",
    "abort",
    "client_cancelled",
    "queue_timeout",
    "generation_timeout",
    "truncated",
    "error",
]
"""``truncated``: the prompt left no room in the context, so nothing was sampled; the attempt cannot go on."""

Opens = Literal["first", "history", "template", "parallel"]
"""Why a call opened a segment: it was the attempt's first; its messages do not extend what was recorded (edited, summarised, another
agent); they do, but the template renders them otherwise (dropped reasoning); the context it extends was in use by a running call."""


class VersionSpan(Message):
    """Tokens ``[start, end)`` of the attempt's sequence were sampled by ``version``."""

    start: int
    end: int
    version: str


MALFORMED_TOOL_CALL = "malformed_tool_call"
"""The name under which a tool call that cannot be read is handed to the harness, with what was written as its arguments."""


class CalledTool(Message):
    """A tool call as parsed from a reply. ``arguments`` is JSON text, or whatever the model wrote where JSON was due."""

    id: str
    name: str
    arguments: str


class EngineTimes(Message):
    """Where a generation's time went in the engine, by its own clock, seconds: until it was scheduled, from there to the first token,
    from there to the last."""

    queue_s: float
    prefill_s: float
    decode_s: float


class RequestRecord(Message):
    """One model call. Its sampled tokens are ``[start, end)`` of the attempt's sequence. Durations in seconds.

    ``queue_s``: from its arrival until the engine was asked; ``generate_s``: until the engine had answered, of which ``engine`` are the
    parts (None: it sampled nothing, or the engine did not tell). ``opens`` marks a call that began a segment; None: it extended one, or
    added no tokens.
    """

    request_id: str
    segment: int
    prompt_tokens: int
    start: int
    end: int
    ending: Ending
    sampling: Sampling
    started_at: float
    queue_s: float
    generate_s: float
    engine: EngineTimes | None = None
    opens: Opens | None = None
    tool_calls: list[CalledTool] = Field(default_factory=list)


class AttemptRecord(Message):
    """All tokens of an attempt: ``len(token_ids) == len(logprobs) == len(loss_mask)``.

    ``loss_mask`` is 1 exactly on sampled tokens; ``logprobs`` are the behaviour logprobs there (processed: after temperature
    and top_p, natural log) and 0.0 elsewhere. ``segments`` holds each segment's first index, starting with 0.
    """

    attempt_id: str
    token_ids: list[int]
    logprobs: list[float]
    loss_mask: list[int]
    segments: list[int]
    version_spans: list[VersionSpan]
    requests: list[RequestRecord]
    messages: list[dict[str, Any]] = Field(
        description="the last message list, with the last reply: the readable transcript"
    )


class RecordRequest(Message):
    """The worker fetches the record at the attempt's end; the session is closed for further calls."""

    attempt_id: str
