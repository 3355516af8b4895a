"""The HTTP face: one POST route per entry of ``protocol.client.ENDPOINTS``, and ``GET /health``. Routes only.

Handlers read the raw body and validate it once with the endpoint's request type; replies arrive as JSON bytes. Errors are
``{"error": "one line"}``: 401 no or unknown key, 403 another role's key, 409 does not fit the present state, 413 too large,
422 not a valid request, 503 going down (clients ask again).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hpcrl.coordinator.ledger import Refused
from hpcrl.coordinator.service import Closing, Service
from hpcrl.errors import UserError
from hpcrl.protocol.client import ENDPOINTS, Endpoint
from hpcrl.protocol.keys import Role, role_key, same_key

__all__ = ["MAX_BODY", "create_app"]

MAX_BODY = 8 * 1024 * 1024
"""Bytes. The largest honest request is a batched report of some hundred items."""

_ROLES: tuple[Role, ...] = ("worker", "scorer", "trainer", "inference", "admin")


class _HttpError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def create_app(service: Service, secret: str) -> FastAPI:
    """The ASGI app. ``secret`` is the run's token, from which the role keys are derived."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    keys = {role: role_key(secret, role) for role in _ROLES}
    for endpoint in ENDPOINTS:
        app.add_route(endpoint.path, _route(service, endpoint, keys), methods=["POST"])
    app.add_route("/health", _health, methods=["GET"])
    return app


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _route(service: Service, endpoint: Endpoint, keys: dict[Role, str]) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        try:
            _authorise(request, endpoint, keys)
            message = endpoint.request.model_validate_json(await _body(request))
            reply = await service.handle(endpoint, message, request.headers.get("idempotency-key"))
        except _HttpError as error:
            return _error(error.status, str(error))
        except ValidationError as error:
            return _error(422, _first_problem(error))
        except UserError as error:
            return _error(422, str(error))
        except Refused as error:
            return _error(409, str(error))
        except Closing:
            return _error(503, "the coordinator is going down; ask again")
        return Response(reply, media_type="application/json")

    return route


def _authorise(request: Request, endpoint: Endpoint, keys: dict[Role, str]) -> None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not given:
        raise _HttpError(401, "send the role's key: Authorization: Bearer KEY (derived from the run's token)")
    roles = [role for role, key in keys.items() if same_key(given, key)]
    if not roles:
        raise _HttpError(401, "unknown key: it was not derived from this run's token")
    if endpoint.role not in roles and "admin" not in roles:
        raise _HttpError(403, f"{endpoint.path} is for the {endpoint.role} role, the key is the {roles[0]}'s")


async def _body(request: Request) -> bytes:
    """The request's body, refused as soon as it is known to be too large."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY:
        raise _HttpError(413, f"the body may have at most {MAX_BODY} bytes")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            raise _HttpError(413, f"the body may have at most {MAX_BODY} bytes")
        parts.append(part)
    return b"".join(parts)


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in problem["loc"]) or "body"
    return f"{place}: {problem['msg']}"


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": message}, status_code=status)
