"""The ``tools`` harness: OpenAI tool calls, each of them one shell command in the sandbox. Pure.

reply with calls         → they are run in order; each result is a message of role ``tool``
a call that cannot be    → is not run; its result says what is wrong, and the model may try again (its own failure, not ours)
reply without calls      → the agent is done
reply cut by length      → nothing of it is run, complete calls before the cut neither; the attempt ends

bash(command)            the command
read_file(path)          cat
write_file(path, content)   missing directories are made, the file is replaced
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpcrl.harness.client import Reply, ToolCall
from hpcrl.harness.steps import Agent, Decision, End, Run, Say, Step
from hpcrl.protocol.record import MALFORMED_TOOL_CALL

__all__ = ["TOOLS", "decide"]


@dataclass(frozen=True, slots=True)
class _Tool:
    description: str
    arguments: Mapping[str, str]
    """Name → description; all of them are text and required."""
    command: Callable[..., str]

    def schema(self, name: str) -> dict[str, Any]:
        properties = {one: {"type": "string", "description": text} for one, text in self.arguments.items()}
        parameters = {"type": "object", "properties": properties, "required": list(self.arguments)}
        return {
            "type": "function",
            "function": {"name": name, "description": self.description, "parameters": parameters},
        }


def _read(path: str) -> str:
    return f"cat -- {shlex.quote(path)}"


def _write(path: str, content: str) -> str:
    target = shlex.quote(path)
    return f'mkdir -p -- "$(dirname -- {target})" && printf %s {shlex.quote(content)} > {target}'


_TOOLS = {
    "bash": _Tool(
        "Run a shell command in the work directory; the result is what it prints.",
        {"command": "the command"},
        lambda command: command,
    ),
    "read_file": _Tool("Read a text file.", {"path": "absolute, or relative to the work directory"}, _read),
    "write_file": _Tool(
        "Create a file or replace its content.",
        {"path": "absolute, or relative to the work directory", "content": "the whole new content"},
        _write,
    ),
}


def decide(reply: Reply) -> Decision:
    """What a reply asks for."""
    if reply.finish_reason == "length":
        return End("length")
    if not reply.tool_calls:
        return End("no_command")
    return [_step(call) for call in reply.tool_calls]


def _step(call: ToolCall) -> Step:
    tool = _TOOLS.get(call.name)
    wrong = _unknown(call.name) if tool is None else ""
    arguments: dict[str, str] = {}
    if tool is not None:
        arguments, wrong = _arguments(tool, call)
    if tool is None or wrong:
        return Say(f"Nothing was run: {wrong}\n", call.id)
    return Run(tool.command(**arguments), call.id, show_exit_code=True)


def _unknown(name: str) -> str:
    if name == MALFORMED_TOOL_CALL:
        return "the tool call is not a JSON object with a name and arguments. Write it again."
    return f"there is no tool {name!r:.100}; the tools are {', '.join(_TOOLS)}."


def _arguments(tool: _Tool, call: ToolCall) -> tuple[dict[str, str], str]:
    """The arguments, or what is wrong with them."""
    try:
        given = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError) as error:
        return {}, f"the arguments of {call.name} are not JSON: {error!s:.200}."
    if not isinstance(given, dict):
        return {}, f"the arguments of {call.name} must be a JSON object."
    for name in tool.arguments:
        if name not in given:
            return {}, f"{call.name} needs the argument {name!r}."
        if not isinstance(given[name], str):
            return {}, f"the argument {name!r} of {call.name} must be text."
        if "\0" in given[name]:
            return {}, f"the argument {name!r} of {call.name} holds a NUL character."
        if not _is_unicode(given[name]):
            return {}, f"the argument {name!r} of {call.name} holds half of a surrogate pair, which is no character."
    unknown = [name for name in given if name not in tool.arguments]
    if unknown:
        return {}, f"{call.name} has no argument {unknown[0]!r:.100}; it takes {', '.join(tool.arguments)}."
    return given, ""


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


TOOLS = Agent(decide, tuple(tool.schema(name) for name, tool in _TOOLS.items()))
