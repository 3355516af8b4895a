"""The HTTP client towards the vLLM child, over a Unix socket: JSON in, JSON out, typed errors.

Not TCP: vLLM's control routes have no authentication, and its listener lets an answer's body wait 40 ms for the acknowledgement of
the head (no TCP_NODELAY).

Every model call passes here, so its cost counts. Client CPU per call (200-token prompt, 64-token answer, 32 at once, one
core): aiohttp 0.2 ms, httpx 2.1 ms, a hand-written pool 0.14 ms. aiohttp comes with vLLM, so it is no further dependency.
Cancelling a call closes its connection, by which vLLM learns that nobody waits for the answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp

from hpcrl.errors import InfraError

__all__ = ["Refused", "UnixHttp"]


class Refused(InfraError):
    """The server answered with an error status."""

    def __init__(self, path: str, status: int, text: str) -> None:
        super().__init__("engine_refused", f"vLLM answered {status} to {path}: {text[:1000]}")
        self.status = status
        self.text = text


class UnixHttp:
    """Connections to the socket ``path``; as many as there are calls at once. Create and close inside a running loop."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._session = aiohttp.ClientSession(
            "http://vllm",
            connector=aiohttp.UnixConnector(
                str(path), limit=0, keepalive_timeout=3.0
            ),  # below uvicorn's 5 s: we close first
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
        )

    async def post(self, path: str, body: dict[str, Any] | None = None, timeout_s: float = 60.0) -> dict[str, Any]:
        """POST ``body`` as JSON; the JSON object of the answer, empty when it is none.

        Raises Refused for an error status, InfraError("engine_unreachable") without an answer, TimeoutError.
        """
        return await self._call("POST", path, body, timeout_s)

    async def get(self, path: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """GET, as :meth:`post`."""
        return await self._call("GET", path, None, timeout_s)

    async def text(self, path: str, timeout_s: float = 60.0) -> str:
        """The text of ``path``. Raises InfraError("engine_unreachable") without an answer of 200, TimeoutError."""
        try:
            async with self._session.get(path, timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
                response.raise_for_status()
                return await response.text()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise InfraError("engine_unreachable", f"no text from vLLM at {path}: {error}") from error

    async def close(self) -> None:
        await self._session.close()

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float, attempts: int = 2
    ) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(method, path, json=body, timeout=timeout) as response:
                answer = await response.read()
                if response.status >= 400:
                    raise Refused(path, response.status, answer.decode("utf-8", "replace"))
                # Some of vLLM's routes answer with nothing, the adapters' ones with a sentence.
                return json.loads(answer) if response.content_type == "application/json" else {}
        except aiohttp.ServerDisconnectedError as error:
            # uvicorn drops a kept connection after an answer 500: that says nothing about this call.
            if attempts > 1 and not self._session.closed:
                return await self._call(method, path, body, timeout_s, attempts - 1)
            raise InfraError("engine_unreachable", f"no answer from vLLM to {path}: {error}") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise InfraError("engine_unreachable", f"no answer from vLLM to {path}: {error}") from error
        except json.JSONDecodeError as error:
            raise InfraError("engine_unreachable", f"vLLM's answer to {path} is not JSON: {error}") from error
