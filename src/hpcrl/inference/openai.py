"""The chat-completions dialect: request → checked values, result → OpenAI's shape. Pure.

Everything that is not understood is refused by name: a parameter silently ignored would be an experiment silently changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hpcrl.config.schema import RolloutSection
from hpcrl.errors import HpcrlError
from hpcrl.protocol.messages import Sampling

__all__ = ["ApiError", "ChatRequest", "completion", "error_body", "parse_chat"]

_PARAMETERS = (
    "messages",
    "model",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "n",
    "stream",
    "user",
)
_ROLES = ("system", "user", "assistant", "tool", "developer")
_MESSAGE_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})


class ApiError(HpcrlError):
    """An answer other than 200: HTTP status, OpenAI-style code, message for a person."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request. ``max_tokens`` is not yet fitted to the context; ``extra`` are vLLM parameters as they are."""

    model: str
    messages: list[dict[str, Any]]
    sampling: Sampling
    stop: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


def parse_chat(body: Any, rollout: RolloutSection) -> ChatRequest:
    """Check a request's JSON. Raises ApiError(400) naming the parameter and what is allowed."""
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_request", "the body must be a JSON object")
    for name, value in body.items():
        if name not in _PARAMETERS and value is not None:
            raise ApiError(
                400, "unknown_parameter", f"parameter {name!r} is not supported; allowed: {', '.join(_PARAMETERS)}"
            )
    if body.get("stream"):
        raise ApiError(400, "unsupported_value", "stream: true is not supported; leave it out")
    if body.get("n") not in (None, 1):
        raise ApiError(400, "unsupported_value", f"n is {body['n']!r}; only 1 is supported")
    _check_temperature(body.get("temperature"), rollout.temperature)
    if _number(body, "top_p", 1.0, 0.0, 1.0) != 1.0:
        # The trainer computes the whole distribution; logprobs within a nucleus would be another one.
        raise ApiError(400, "unsupported_value", f"top_p is {body['top_p']!r}; only 1 is supported")
    sampling = Sampling(
        temperature=rollout.temperature,
        max_tokens=min(_max_tokens(body, rollout.max_tokens), rollout.max_tokens),
    )
    seed = body.get("seed")
    if seed is not None and not _is_int(seed):
        raise ApiError(400, "invalid_value", f"seed is {seed!r}; expected an integer")
    return ChatRequest(
        model=str(body.get("model") or ""),
        messages=_messages(body.get("messages")),
        sampling=sampling,
        stop=_stop(body.get("stop")),
        extra={} if seed is None else {"seed": seed},
    )


def completion(
    request_id: str, model: str, reply: str, ending: str, prompt: int, sampled: int, now: float
) -> dict[str, Any]:
    """OpenAI's chat.completion object. ``prompt`` and ``sampled`` are numbers of tokens."""
    return {
        "id": request_id,
        "object": "chat.completion",
        "created": int(now),
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": reply},
                "finish_reason": ending,
                "logprobs": None,
            }
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
    }


def error_body(code: str, message: str, status: int) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _check_temperature(given: Any, configured: float) -> None:
    if given is not None and (not _is_number(given) or abs(given - configured) > 1e-9):
        raise ApiError(
            400,
            "temperature_fixed",
            f"temperature is {given!r} but this run samples at rollout.temperature {configured:g}, because the trainer computes "
            "probabilities at that temperature; leave the parameter out",
        )


def _max_tokens(body: dict[str, Any], default: int) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if value is not None:
            if not _is_int(value) or value < 1:
                raise ApiError(400, "invalid_value", f"{name} is {value!r}; expected an integer of at least 1")
            return int(value)
    return default


def _number(body: dict[str, Any], name: str, default: float, above: float, upto: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if not _is_number(value) or not above < value <= upto:
        raise ApiError(
            400, "invalid_value", f"{name} is {value!r}; expected a number above {above:g} and at most {upto:g}"
        )
    return float(value)


def _stop(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops) or len(stops) > 4:
        raise ApiError(400, "invalid_value", "stop must be a text or a list of up to 4 texts, none of them empty")
    return stops


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ApiError(400, "invalid_value", "messages must be a list with at least one message")
    return [_message(index, message) for index, message in enumerate(value)]


def _message(index: int, message: Any) -> dict[str, Any]:
    """One message in its canonical form, so that lists can be compared: absent and empty parts left out, content as text."""
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise ApiError(400, "invalid_value", f"messages[{index}] must be an object with a role of {', '.join(_ROLES)}")
    kept = {name: part for name, part in message.items() if part is not None and part != []}
    unknown = set(kept) - _MESSAGE_KEYS
    if unknown:
        raise ApiError(400, "unknown_parameter", f"messages[{index}].{min(unknown)} is not supported")
    kept["content"] = _content(index, message.get("content"))
    return kept


def _content(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ApiError(
                400, "invalid_value", f"messages[{index}].content must be text, or a list of parts of type text"
            )
        texts.append(part["text"])
    return "".join(texts)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
