"""What arrives over HTTP: a JSON body within bounds, the bearer key, the idempotency key. Raises ApiError for anything else."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from hpcrl.inference.answers import ApiError
from hpcrl.inference.messages import strict_json

__all__ = ["bearer", "idempotency_key", "read_body", "read_json"]

_MAX_BYTES = 16 << 20
_MAX_KEY = 255


async def read_body(request: Request) -> bytes:
    """The whole body, at most 16 MiB."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BYTES:
            raise ApiError(413, "body_too_large", f"the body has more than {_MAX_BYTES} bytes")
    return bytes(body)


def read_json(body: bytes) -> Any:
    """The body as JSON that can be processed (``strict_json``)."""
    try:
        return strict_json(body)
    except ValueError as error:  # also UnicodeDecodeError
        raise ApiError(400, "invalid_request", f"the body is not JSON that can be read: {error!s:.300}") from error


def bearer(request: Request) -> str:
    """The bearer key, or nothing."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def idempotency_key(request: Request) -> str | None:
    """The header ``Idempotency-Key``; None when there is none."""
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= _MAX_KEY:
        raise ApiError(400, "invalid_value", f"Idempotency-Key must have 1 to {_MAX_KEY} characters")
    return key
