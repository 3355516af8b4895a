"""Tool calls out of a reply's text, one parser per model family. Pure.

    hermes    <tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>, any number of times    Hermes 2 Pro, Qwen2.5, Qwen3, SmolLM3
    llama3    {"name": "f", "parameters": {…}}, the whole reply; several separated by ``;``       Llama 3.1, 3.2, 3.3
    mistral   [TOOL_CALLS] [{"name": "f", "arguments": {…}, "id": "…"}, …]                        Mistral 7B v0.3, Nemo, Small
              [TOOL_CALLS]f[ARGS]{…}                                                              Mistral Small 3.2 and later

Formats as the models' chat templates and cards describe them. A call that cannot be read is not dropped: it is handed on under the
name ``malformed_tool_call`` with what was written as its arguments, so that the harness can tell the model. Only whole replies are
parsed; one cut by length holds no calls at all.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpcrl.errors import ConfigError
from hpcrl.inference.messages import strict_json
from hpcrl.protocol.record import MALFORMED_TOOL_CALL, CalledTool

__all__ = ["FAMILIES", "Parsed", "family_of", "parse_reply"]

_THOUGHT_END = "</think>"
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
# Possessive throughout: a model may write any number of spaces, and no part could give back what another one takes.
_MISTRAL_ARGS = re.compile(r"\s*+([^\s\[{]++)\s*+(?:\[CALL_ID\][^\[{]*+)?+(?:\[ARGS\])?+\s*+(?=\{)")
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Parsed:
    """A reply's text apart from its calls, and the calls."""

    content: str
    calls: list[CalledTool]


@dataclass(frozen=True, slots=True)
class _Found:
    name: str
    arguments: str
    call_id: str = ""


def family_of(configured: str, template: str) -> str:
    """The family by name, or for ``auto`` the one whose marks the chat template holds. Raises ConfigError."""
    if configured in FAMILIES:
        return configured
    if configured != "auto":
        raise ConfigError(f"model.tool_calls is {configured!r}; allowed: auto, {', '.join(FAMILIES)}")
    if "<tool_call>" in template:
        return "hermes"
    if _MISTRAL in template:
        return "mistral"
    return "llama3" if "<|start_header_id|>" in template else "hermes"


def parse_reply(family: str, text: str, request_id: str) -> Parsed:
    """The calls of a complete reply; ``text`` is as sampled, special tokens included, without the end token."""
    at = text.rfind(_THOUGHT_END)
    split = 0 if at < 0 else at + len(_THOUGHT_END)
    content, found = FAMILIES[family](text[split:])
    if not found:
        return Parsed(text, [])
    calls = [
        CalledTool(id=call.call_id or _call_id(request_id, index), name=call.name, arguments=call.arguments)
        for index, call in enumerate(found)
    ]
    return Parsed((text[:split] + content).strip(), calls)


def _call_id(request_id: str, index: int) -> str:
    """Nine letters and digits: what Mistral's templates insist on, and what every other one takes."""
    return hashlib.sha256(f"{request_id}/{index}".encode()).hexdigest()[:9]


def _hermes(text: str) -> tuple[str, list[_Found]]:
    found = [_read(match[1]) for match in _HERMES.finditer(text)]
    return _HERMES.sub("", text), found


def _llama3(text: str) -> tuple[str, list[_Found]]:
    body = text.strip()
    marked = body.startswith("<|python_tag|>")
    body = body.removeprefix("<|python_tag|>").strip()
    if not marked and not re.match(r'\{\s*"(name|type|function)"', body):
        return text, []
    found: list[_Found] = []
    at = 0
    while at < len(body):
        try:
            _, end = _DECODER.raw_decode(body, at)
        except (ValueError, RecursionError):
            return "", [*found, _Found(MALFORMED_TOOL_CALL, body[at:])]
        found.append(_read(body[at:end]))
        at = end
        while at < len(body) and body[at] in "; \n\t\r":
            at += 1
    return "", found


def _mistral(text: str) -> tuple[str, list[_Found]]:
    content, *parts = text.split(_MISTRAL)
    found: list[_Found] = []
    for part in parts:
        named = _MISTRAL_ARGS.match(part)
        if named is not None:
            found.append(_Found(named[1], part[named.end() :].strip()))
            continue
        try:
            values = strict_json(part.strip())
        except ValueError:
            values = None
        if not isinstance(values, list) or not values:
            found.append(_Found(MALFORMED_TOOL_CALL, part.strip()))
            continue
        found += [_entry(value) for value in values]
    return content, found


def _read(text: str) -> _Found:
    try:
        value = strict_json(text.strip())
    except ValueError:
        return _Found(MALFORMED_TOOL_CALL, text.strip())
    return _entry(value, text.strip())


def _entry(value: Any, text: str | None = None) -> _Found:
    written = json.dumps(value, ensure_ascii=False) if text is None else text
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return _Found(MALFORMED_TOOL_CALL, written)
    arguments = value.get("arguments", value.get("parameters", {}))
    given = value.get("id")
    call_id = given if isinstance(given, str) and _MISTRAL_ID.fullmatch(given) else ""
    if isinstance(arguments, str):
        return _Found(value["name"], arguments, call_id)
    return _Found(value["name"], json.dumps(arguments, ensure_ascii=False), call_id)


FAMILIES: dict[str, Callable[[str], tuple[str, list[_Found]]]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
}
"""Family → parser: text → (the text without calls, the calls)."""
