"""A minimal asyncio client for OpenAI-compatible chat completions.

aiohttp, because a training step makes hundreds of small calls on few cores: 0.11 ms of CPU per call against 1.2 ms for httpx
(600 calls of one small message, 16 at once, loopback). One ``aiohttp.ClientSession`` per worker keeps the connections; a
``ChatClient`` adds an attempt's URL and key to it and costs nothing.

What a failed call means for the attempt is decided here, once:

    400 context_length_exceeded      ContextExceeded    the policy used up its context: the attempt ends truncated, scored
    401, 403                         InfraError         model_key_refused
    409 stale_version                InfraError         stale_version: the replica moved on without this attempt
    other 4xx                        InfraError         model_request_refused (a bug or a wrong URL, not the policy's doing)
    429, 5xx                         InfraError         model_unavailable
    no answer in time                InfraError         model_timeout
    connection lost or refused       InfraError         model_connection
    200 with another body            InfraError         model_reply_invalid
    200 with finish_reason abort     InfraError         generation_aborted
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import aiohttp

from hpcrl.errors import InfraError, PolicyError

__all__ = ["ChatClient", "ContextExceeded", "Message", "Model", "Reply", "ToolCall"]

Message = dict[str, Any]
"""One chat message: ``{"role": "user", "content": "…"}``."""

_CONTEXT_CODE = "context_length_exceeded"


class ContextExceeded(PolicyError):
    """The conversation no longer fits the model's context."""

    def __init__(self, message: str = "") -> None:
        super().__init__("truncated", message)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of a reply; ``arguments`` is JSON text if the model wrote JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """One completion. ``finish_reason`` is ``stop``, ``length`` or ``tool_calls``."""

    text: str
    finish_reason: str
    request_id: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> Message:
        """The reply as it stands in the conversation."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


class Model(Protocol):
    """What the agent loop needs of a model."""

    async def complete(self, messages: Sequence[Message], timeout_s: float) -> Reply:
        """One completion. Raises ContextExceeded, InfraError."""
        ...


class ChatClient:
    """One attempt's model: ``POST {base_url}/chat/completions`` with a bearer key. ``base_url`` ends in ``/v1``."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str,
        api_key: str,
        max_tokens: int,
        model: str = "policy",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._session = session
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        self._fixed = {"model": model, "max_tokens": max_tokens} | ({"tools": list(tools)} if tools else {})

    async def complete(self, messages: Sequence[Message], timeout_s: float) -> Reply:
        """One completion; cancelling drops the connection, which ends the generation. Raises ContextExceeded, InfraError."""
        body = json.dumps({**self._fixed, "messages": list(messages)})
        try:
            async with self._session.post(
                self._url, data=body, headers=self._headers, timeout=aiohttp.ClientTimeout(total=timeout_s)
            ) as response:
                status, content = response.status, await response.read()
        except TimeoutError as error:
            raise InfraError("model_timeout", f"no reply from {self._url} within {timeout_s:.1f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise InfraError("model_connection", f"{self._url}: {str(error) or type(error).__name__}") from error
        if status != 200:
            _refused(status, content)
        return _read_reply(content)


def _refused(status: int, content: bytes) -> NoReturn:
    code, message = _error_of(content)
    if status == 400 and code == _CONTEXT_CODE:
        raise ContextExceeded(message)
    if status in (401, 403):
        raise InfraError("model_key_refused", message)
    if status == 409:
        raise InfraError(code or "stale_version", message)
    reason = "model_unavailable" if status >= 500 or status == 429 else "model_request_refused"
    raise InfraError(reason, f"HTTP {status}: {message}")


def _error_of(content: bytes) -> tuple[str, str]:
    """(code, message) of an OpenAI error body; other bodies give their first characters as the message."""
    try:
        error = json.loads(content)["error"]
        return str(error.get("code") or ""), str(error.get("message") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", content[:300].decode("utf-8", "replace")


def _read_reply(content: bytes) -> Reply:
    try:
        body: dict[str, Any] = json.loads(content)
        choice = body["choices"][0]
        text = choice["message"]["content"] or ""
        finish_reason = choice["finish_reason"]
        calls = tuple(
            ToolCall(str(call["id"]), str(call["function"]["name"]), str(call["function"]["arguments"]))
            for call in choice["message"].get("tool_calls") or ()
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise InfraError(
            "model_reply_invalid", f"not a chat completion: {content[:200].decode('utf-8', 'replace')}"
        ) from error
    if not isinstance(text, str) or finish_reason not in ("stop", "length", "tool_calls"):
        reason = "generation_aborted" if finish_reason == "abort" else "model_reply_invalid"
        raise InfraError(reason, f"finish_reason is {finish_reason!r}")
    return Reply(text, finish_reason, str(body.get("id", "")), calls)
