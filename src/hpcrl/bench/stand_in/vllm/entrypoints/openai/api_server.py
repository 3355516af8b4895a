"""The routes of vLLM that a replica uses, with a script in place of a model: starts in a second, samples at once.

For measuring and breaking what is around the engine. Updates read the staged bytes as the plugin does, and compare them with their
manifest; what is "sampled" is a command in bytes, so that it fits the quickstart's tokenizer and harness.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from aiohttp import web

from hpcrl.errors import DataError
from hpcrl.weights.vllm_engine import UNTOUCHED, check_staged

__all__ = ["Engine"]

_LOOK, _RIGHT, _WRONG = (b"```bash\n%s\n```" % command for command in (b"cat answer", b"echo right > answer", b"true"))
_LOGPROB = -0.5
_TOKEN_S = 0.002


class Engine:
    """One version at a time; nothing is sampled while paused."""

    def __init__(self) -> None:
        self._version = ""
        self._open = asyncio.Event()
        self._open.set()

    def routes(self) -> list[web.RouteDef]:
        nothing = self._nothing
        return [
            web.get("/health", nothing),
            web.get("/weight_info", self._info),
            web.post("/init_weight_transfer_engine", nothing),
            web.post("/update_weight_version", self._name),
            web.post("/pause", self._pause),
            web.post("/start_weight_update", nothing),
            web.post("/update_weights", self._update),
            web.post("/finish_weight_update", self._finish),
            web.post("/resume", self._resume),
            web.post("/inference/v1/generate", self._generate),
        ]

    async def _nothing(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._version})

    async def _name(self, request: web.Request) -> web.Response:
        self._version = (await request.json())["new_version"]
        return web.json_response({})

    async def _pause(self, _: web.Request) -> web.Response:
        self._open.clear()
        return web.json_response({})

    async def _resume(self, _: web.Request) -> web.Response:
        self._open.set()
        return web.json_response({})

    async def _update(self, request: web.Request) -> web.Response:
        info = (await request.json())["update_info"]
        manifest = info["manifest"]
        try:
            with NamedTemporaryFile("w", suffix=".json") as file:
                file.write(json.dumps(manifest) if isinstance(manifest, dict) else Path(manifest).read_text("utf-8"))
                file.flush()
                await asyncio.to_thread(check_staged, Path(file.name), Path(info["staging"]))
        except (DataError, OSError) as error:
            return web.json_response({"error": f"{UNTOUCHED}: {error}"}, status=500)
        return web.json_response({})

    async def _finish(self, request: web.Request) -> web.Response:
        self._version = (await request.json())["weight_version"]
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.Response:
        asked: dict[str, Any] = await request.json()
        parameters = asked["sampling_params"]
        await self._open.wait()
        looked = _LOOK in bytes(token for token in asked["token_ids"] if token < 256)
        command = random.choice((_RIGHT, _WRONG)) if looked else _LOOK
        token_ids = [*command, *parameters.get("stop_token_ids", [])[:1]][: parameters["max_tokens"]]
        await asyncio.sleep(_TOKEN_S * len(token_ids))
        choice = {
            "token_ids": token_ids,
            "finish_reason": "stop" if len(token_ids) > len(command) else "length",
            "logprobs": {"content": [{"token_id": token, "logprob": _LOGPROB} for token in token_ids]},
            "weight_versions": [{"version": self._version, "start": 0, "end": len(token_ids)}],
        }
        return web.json_response({"model": asked["model"], "choices": [choice]})


def main() -> None:
    parser = argparse.ArgumentParser(prog="vllm (stand-in)")
    parser.add_argument("--uds", required=True)
    given, _ = parser.parse_known_args()
    app = web.Application(client_max_size=1 << 30)
    app.add_routes(Engine().routes())
    web.run_app(app, path=given.uds, print=None)


if __name__ == "__main__":
    main()
