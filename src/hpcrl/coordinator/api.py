"""The HTTP face: one POST route per entry of ``protocol.client.ENDPOINTS``, and ``GET /health``. Routes only.

A bare ASGI application: bodies are validated once, with the endpoint's request type, and replies arrive as JSON bytes, so that a
framework would only add its share to every call. Errors are ``{"error": "one line"}``: 401 no or unknown key, 403 another role's
key, 404 and 405 no such call, 409 does not fit the present state, 413 too large, 422 not a valid request, 503 going down (clients
ask again).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

from pydantic import ValidationError

from hpcrl.coordinator.ledger import Refused
from hpcrl.coordinator.service import Closing, Service
from hpcrl.errors import UserError
from hpcrl.protocol.client import ENDPOINTS, Endpoint
from hpcrl.protocol.keys import Role, role_key, same_key

__all__ = ["MAX_BODY", "Api"]

MAX_BODY = 8 * 1024 * 1024
"""Bytes. The largest honest request is a batched report of some hundred items."""

_ROLES: tuple[Role, ...] = ("worker", "scorer", "trainer", "inference", "admin")

Message = MutableMapping[str, Any]
Receive = Callable[[], Coroutine[Any, Any, Message]]
Send = Callable[[Message], Awaitable[None]]


class _HttpError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Caller:
    """Notices when the connection of a waiting call is closed."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[Message] | None = None

    @property
    def gone(self) -> bool:
        """Whether nobody waits for the answer any more, as far as that was seen since the last look; begins to look out for it."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._receive())  # after the body, the next event is the disconnection
        return self._task.done()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()


class Api:
    """The ASGI application. ``secret`` is the run's, from which the role keys are derived."""

    def __init__(self, service: Service, secret: str) -> None:
        self._service = service
        self._keys = {role: role_key(secret, role) for role in _ROLES}
        self._endpoints = {endpoint.path: endpoint for endpoint in ENDPOINTS}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            status, content = 200, await self._answer(scope, receive)
        except _HttpError as error:
            status, content = error.status, _error(str(error))
        except ValidationError as error:
            status, content = 422, _error(_first_problem(error))
        except UserError as error:
            status, content = 422, _error(str(error))
        except Refused as error:
            status, content = 409, _error(str(error))
        except Closing:
            status, content = 503, _error("the coordinator is going down; ask again")
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _answer(self, scope: Message, receive: Receive) -> bytes:
        path, method = scope["path"], scope["method"]
        if path == "/health" and method == "GET":
            return b'{"status":"ok"}'
        endpoint = self._endpoints.get(path)
        if endpoint is None:
            raise _HttpError(404, f"there is no call {path}")
        if method != "POST":
            raise _HttpError(405, f"{path} is called with POST")
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self._authorise(headers.get("authorization", ""), endpoint)
        message = endpoint.request.model_validate_json(await _body(headers.get("content-length", ""), receive))
        caller = _Caller(receive)
        try:
            return await self._service.handle(endpoint, message, headers.get("idempotency-key"), caller)
        finally:
            caller.close()

    def _authorise(self, authorization: str, endpoint: Endpoint) -> None:
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise _HttpError(
                401, "send the role's key: Authorization: Bearer KEY (from keys/ROLE in the run directory)"
            )
        roles = [role for role, key in self._keys.items() if same_key(given, key)]
        if not roles:
            raise _HttpError(401, "unknown key: it is none of this run's role keys")
        if endpoint.role not in roles and "admin" not in roles:
            raise _HttpError(403, f"{endpoint.path} is for the {endpoint.role} role, the key is the {roles[0]}'s")


async def _body(declared: str, receive: Receive) -> bytes:
    """The request's body, refused as soon as it is known to be too large."""
    if declared.isdecimal() and int(declared) > MAX_BODY:
        raise _HttpError(413, f"the body may have at most {MAX_BODY} bytes")
    parts, size, more = [], 0, True
    while more:
        event = await receive()
        if event["type"] != "http.request":
            raise Closing  # the caller has gone
        parts.append(event.get("body", b""))
        size += len(parts[-1])
        more = event.get("more_body", False)
        if size > MAX_BODY:
            raise _HttpError(413, f"the body may have at most {MAX_BODY} bytes")
    return b"".join(parts)


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in problem["loc"]) or "body"
    return f"{place}: {problem['msg']}"


def _error(message: str) -> bytes:
    return json.dumps({"error": message}).encode()
