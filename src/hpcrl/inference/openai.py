"""The dialect's requests: JSON → checked values. Pure.

Everything that is not understood is refused by name: a parameter silently ignored would be an experiment silently changed. Parameters
that are known but not supported may be given with the value that changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hpcrl.config.sections import RolloutSection
from hpcrl.inference.answers import ApiError
from hpcrl.inference.messages import parse_messages, parse_tools
from hpcrl.protocol.messages import Sampling

__all__ = ["ChatRequest", "CompletionRequest", "Request", "parse_chat", "parse_completion"]

_COMMON = ("model", "max_tokens", "temperature", "top_p", "seed", "stop", "n", "stream", "stream_options", "user")
_CHAT = ("messages", *_COMMON, "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls")
_COMPLETION = ("prompt", *_COMMON)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "parallel_tool_calls": (True,),
}
"""What may be given only with a value that changes nothing."""
_INT64 = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What all requests have. ``max_tokens`` is not yet fitted to the context; ``extra`` are vLLM parameters as they are."""

    model: str
    sampling: Sampling
    stop: list[str] = field(default_factory=list)
    stream: bool = False
    include_usage: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(Request):
    """A checked chat request; ``tools`` is None where none are offered."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(Request):
    """A checked text completion: the prompt as text, or as token ids."""

    prompt: str | list[int]


def parse_chat(body: Any, rollout: RolloutSection) -> ChatRequest:
    """Check a chat request's JSON. Raises ApiError(400) naming the parameter and what is allowed."""
    checked = _object(body, _CHAT)
    choice = checked.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise ApiError(400, "unsupported_value", f"tool_choice is {choice!r:.100}; supported are 'auto' and 'none'")
    tools = parse_tools(checked.get("tools"))
    return ChatRequest(
        messages=parse_messages(checked.get("messages")),
        tools=None if choice == "none" else tools,
        **_common(checked, rollout, ("max_completion_tokens", "max_tokens")),
    )


def parse_completion(body: Any, rollout: RolloutSection) -> CompletionRequest:
    """Check a text completion's JSON. Raises ApiError(400)."""
    checked = _object(body, _COMPLETION)
    prompt = checked.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    ids = isinstance(prompt, list) and all(_is_int(token) and 0 <= token < 1 << 31 for token in prompt)
    if not prompt or not (ids or isinstance(prompt, str)):
        raise ApiError(400, "invalid_value", "prompt must be one text, or one list of token ids, and not empty")
    return CompletionRequest(prompt=prompt, **_common(checked, rollout, ("max_tokens",)))


def _object(body: Any, allowed: tuple[str, ...]) -> dict[str, Any]:
    """The given parameters, without those that are null or change nothing."""
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_request", "the body must be a JSON object")
    kept = {}
    for name, value in body.items():
        if value is None:
            continue
        neutral = _NEUTRAL.get(name)
        if neutral is not None:
            if not any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in neutral):
                raise ApiError(400, "unsupported_value", f"{name} is {value!r:.100}; only {neutral[0]!r} is supported")
        elif name not in allowed:
            raise ApiError(
                400, "unknown_parameter", f"parameter {name!r:.100} is not supported; allowed: {', '.join(allowed)}"
            )
        else:
            kept[name] = value
    return kept


def _common(body: dict[str, Any], rollout: RolloutSection, max_names: tuple[str, ...]) -> dict[str, Any]:
    _check_temperature(body.get("temperature"), rollout.temperature)
    if _number(body, "top_p", 1.0, 0.0, 1.0) != 1.0:
        # The trainer computes the whole distribution; logprobs within a nucleus would be another one.
        raise ApiError(400, "unsupported_value", f"top_p is {body['top_p']!r}; only 1 is supported")
    seed = body.get("seed")
    if seed is not None and not (_is_int(seed) and -_INT64 <= seed < _INT64):
        raise ApiError(400, "invalid_value", f"seed is {seed!r:.100}; expected an integer of 64 bits")
    model, stream = body.get("model", ""), body.get("stream", False)
    if not isinstance(model, str):
        raise ApiError(400, "invalid_value", f"model is {model!r:.100}; expected a name")
    if not isinstance(stream, bool):
        raise ApiError(400, "invalid_value", f"stream is {stream!r:.100}; expected true or false")
    return {
        "model": model,
        "sampling": Sampling(
            temperature=rollout.temperature,
            max_tokens=min(_max_tokens(body, max_names, rollout.max_tokens), rollout.max_tokens),
        ),
        "stop": _stop(body.get("stop")),
        "stream": stream,
        "include_usage": _include_usage(body.get("stream_options"), stream),
        "extra": {} if seed is None else {"seed": seed},
    }


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        raise ApiError(400, "invalid_value", "stream_options is only for stream: true")
    if not isinstance(options, dict) or set(options) - {"include_usage"}:
        raise ApiError(400, "unsupported_value", "stream_options may only hold include_usage")
    if not isinstance(options.get("include_usage", False), bool):
        raise ApiError(400, "invalid_value", "stream_options.include_usage must be true or false")
    return bool(options.get("include_usage"))


def _check_temperature(given: Any, configured: float) -> None:
    # Bounds first: an integer of JSON may be beyond what can be subtracted from.
    if given is not None and (not _is_number(given) or not -1e3 < given < 1e3 or abs(given - configured) > 1e-9):
        raise ApiError(
            400,
            "temperature_fixed",
            f"temperature is {given!r:.100} but this run samples at rollout.temperature {configured:g}, because the trainer "
            "computes probabilities at that temperature; leave the parameter out",
        )


def _max_tokens(body: dict[str, Any], names: tuple[str, ...], default: int) -> int:
    for name in names:
        value = body.get(name)
        if value is not None:
            if not _is_int(value) or value < 1:
                raise ApiError(400, "invalid_value", f"{name} is {value!r:.100}; expected an integer of at least 1")
            return int(value)
    return default


def _number(body: dict[str, Any], name: str, default: float, above: float, upto: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if not _is_number(value) or not above < value <= upto:
        raise ApiError(
            400, "invalid_value", f"{name} is {value!r:.100}; expected a number above {above:g} and at most {upto:g}"
        )
    return float(value)


def _stop(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops) or len(stops) > 4:
        raise ApiError(400, "invalid_value", "stop must be a text or a list of up to 4 texts, none of them empty")
    return stops


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
