"""Answers in OpenAI's shape: completions, their streamed form, errors. Pure.

A stream is sent when its generation is complete, as a few events at once: the record, the refusal of a reply by a wrong version and
the parsing of tool calls all need the whole reply, and an agent acts on whole replies only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from hpcrl.errors import HpcrlError
from hpcrl.protocol.record import CalledTool, Ending

__all__ = ["Answer", "ApiError", "chat_completion", "chat_events", "error_body", "text_completion", "text_events"]

Body = dict[str, Any]


class ApiError(HpcrlError):
    """An answer other than 200: HTTP status, OpenAI-style code, message for a person."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Answer:
    """A recorded reply. ``prompt`` and ``sampled`` are numbers of tokens."""

    request_id: str
    model: str
    text: str
    ending: Ending
    prompt: int
    sampled: int
    now: float
    called: list[CalledTool] = field(default_factory=list)


def chat_completion(answer: Answer) -> Body:
    """OpenAI's chat.completion object."""
    message: Body = {"role": "assistant", "content": answer.text}
    if answer.called:
        message["content"] = answer.text or None
        message["tool_calls"] = _tool_calls(answer)
    choice = {"index": 0, "message": message, "finish_reason": answer.ending, "logprobs": None}
    return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def text_completion(answer: Answer) -> Body:
    """OpenAI's text_completion object."""
    choice = {"index": 0, "text": answer.text, "finish_reason": answer.ending, "logprobs": None}
    return {**_head(answer, "text_completion"), "choices": [choice], "usage": _usage(answer)}


def chat_events(answer: Answer, include_usage: bool) -> bytes:
    """The reply as server-sent events: role, content, tool calls, finish reason, then the usage where it was asked for."""
    deltas: list[Body] = [{"role": "assistant", "content": ""}]
    if answer.text:
        deltas.append({"content": answer.text})
    deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(_tool_calls(answer))]
    choices: list[Body] = [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": answer.ending, "logprobs": None})
    return _events(answer, "chat.completion.chunk", choices, include_usage)


def text_events(answer: Answer, include_usage: bool) -> bytes:
    """A text completion as server-sent events."""
    choice = {"index": 0, "text": answer.text, "finish_reason": answer.ending, "logprobs": None}
    return _events(answer, "text_completion", [choice], include_usage)


def error_body(code: str, message: str, status: int) -> Body:
    """OpenAI's error object."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _events(answer: Answer, kind: str, choices: list[Body], include_usage: bool) -> bytes:
    head = _head(answer, kind)
    if include_usage:
        head["usage"] = None
    bodies = [{**head, "choices": [choice]} for choice in choices]
    if include_usage:
        bodies.append({**head, "choices": [], "usage": _usage(answer)})
    lines = [json.dumps(body, ensure_ascii=False) for body in bodies]
    return "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode()


def _head(answer: Answer, kind: str) -> Body:
    return {"id": answer.request_id, "object": kind, "created": int(answer.now), "model": answer.model}


def _usage(answer: Answer) -> Body:
    total = answer.prompt + answer.sampled
    return {"prompt_tokens": answer.prompt, "completion_tokens": answer.sampled, "total_tokens": total}


def _tool_calls(answer: Answer) -> list[Body]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.called
    ]
