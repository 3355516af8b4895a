"""Messages and tools of a request in one canonical form, so that lists can be compared and templates can render them. Pure.

Absent and empty parts are left out, content is text, ``developer`` is ``system``, arguments of tool calls are JSON values (templates
expect those) where they are JSON. What is not understood is refused by name.
"""

from __future__ import annotations

import json
import math
from typing import Any

from hpcrl.inference.answers import ApiError

__all__ = ["canonical_call", "parse_messages", "parse_tools", "size", "strict_json"]

_ROLES = ("system", "user", "assistant", "tool", "developer")
_MESSAGE_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})
_MAX_TOOLS = 128
_MAX_DEPTH = 64


def strict_json(text: str | bytes) -> Any:
    """JSON that can be rendered, recorded and written again. Raises ValueError.

    At most 64 levels deep, no half surrogate pairs, none of Python's extensions (NaN, Infinity), no number beyond a double.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep") from None
    if _may_be_odd(text):
        _check(value)
    return value


def size(value: Any) -> int:
    """Characters of all texts in a JSON value, and 1 for anything else in it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return 1 + sum(len(name) + size(part) for name, part in value.items())
    return 1 + sum(map(size, value)) if isinstance(value, list) else 1


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text:.40} is beyond what a number can be")
    return value


def _may_be_odd(text: str | bytes) -> bool:
    """Whether the value must be walked to be sure of it."""
    if isinstance(text, bytes):
        return b"\\u" in text or b"\xed" in text or text.count(b"[") + text.count(b"{") > _MAX_DEPTH
    return "\\u" in text or text.count("[") + text.count("{") > _MAX_DEPTH


def _check(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > _MAX_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.keys()
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str) and not item.isascii():
                _check_text(item)
        level = below


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("a text holds half of a surrogate pair: it is not Unicode") from None


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """The messages of a chat request. Raises ApiError(400)."""
    if not isinstance(value, list) or not value:
        raise ApiError(400, "invalid_value", "messages must be a list with at least one message")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def parse_tools(value: Any) -> list[dict[str, Any]] | None:
    """The tools of a chat request; None when there are none. Raises ApiError(400)."""
    if value is None or value == []:
        return None
    if not isinstance(value, list) or len(value) > _MAX_TOOLS:
        raise ApiError(400, "invalid_value", f"tools must be a list of up to {_MAX_TOOLS} tools")
    return [_tool(f"tools[{index}]", tool) for index, tool in enumerate(value)]


def canonical_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call as it stands in a canonical message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": _arguments(arguments)}}


def _message(place: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or message["role"] not in _ROLES:
        raise ApiError(400, "invalid_value", f"{place} must be an object with a role of {', '.join(_ROLES)}")
    kept = {name: part for name, part in message.items() if part is not None and part != []}
    unknown = set(kept) - _MESSAGE_KEYS
    if unknown:
        raise ApiError(400, "unknown_parameter", f"{place}.{min(unknown):.100} is not supported")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(kept.get(name, ""), str):
            raise ApiError(400, "invalid_value", f"{place}.{name} must be text")
    kept["content"] = _content(place, message.get("content"))
    if kept["role"] == "developer":
        kept["role"] = "system"
    if "tool_calls" in kept:
        if kept["role"] != "assistant" or not isinstance(kept["tool_calls"], list):
            raise ApiError(400, "invalid_value", f"{place}.tool_calls must be a list, in a message of the assistant")
        kept["tool_calls"] = [_call(f"{place}.tool_calls[{at}]", call) for at, call in enumerate(kept["tool_calls"])]
    return kept


def _content(place: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ApiError(400, "invalid_value", f"{place}.content must be text, or a list of parts of type text")
        texts.append(part["text"])
    return "".join(texts)


def _call(place: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) and call.get("type", "function") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(
            400, "invalid_value", f"{place} must be an object of type function, with a function and its name"
        )
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str | dict):
        raise ApiError(400, "invalid_value", f"{place}.function.arguments must be JSON text")
    call_id = call.get("id")
    if not isinstance(call_id, str):
        raise ApiError(400, "invalid_value", f"{place}.id must be text")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return canonical_call(call_id, function["name"], text)


def _arguments(text: str) -> Any:
    try:
        value = strict_json(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _tool(place: str, tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ApiError(
            400, "invalid_value", f"{place} must be an object of type function, with a function and its name"
        )
    if not isinstance(function.get("description") or "", str):
        raise ApiError(400, "invalid_value", f"{place}.function.description must be text")
    if not isinstance(function.get("parameters") or {}, dict):
        raise ApiError(400, "invalid_value", f"{place}.function.parameters must be a JSON schema, an object")
    if function.get("strict"):
        raise ApiError(
            400, "unsupported_value", f"{place}.function.strict is not supported: sampling is not constrained"
        )
    kept = {name: part for name, part in function.items() if part is not None and name != "strict"}
    # Templates write a tool as it stands here: in the order that models were shown.
    ordered = {"name": "", "description": "", "parameters": {"type": "object"}}
    return {"type": "function", "function": ordered | kept}
