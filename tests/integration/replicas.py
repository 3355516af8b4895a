"""Real replicas for tests: small models, staged versions of them, an event loop in a thread, and a harness that calls the proxy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from hpcrl.protocol.keys import AttemptKey, Pin, records_key, sign_attempt_key
from hpcrl.protocol.record import AttemptRecord
from hpcrl.protocol.version import PolicyVersion
from hpcrl.weights.digest import chunk_digest
from hpcrl.weights.manifest import Chunk, Manifest, cut

__all__ = ["SECRET", "Client", "Loop", "forward_logprobs", "never_ending_model", "save_model", "stage"]

SECRET = "test-secret"
T = TypeVar("T")


class Loop:
    """An event loop in a thread, so that one server serves several tests."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(600)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


def save_model(path: Path, seed: int, *, tied: bool = True) -> Path:
    """A random model of the quickstart's shape, with its tokenizer."""
    from hpcrl.quickstart.model import new_model
    from hpcrl.quickstart.tokenizer import build_tokenizer

    model = new_model(seed)
    if not tied:
        model.config.tie_word_embeddings = False
        model = type(model)(model.config)
    model.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


def never_ending_model(path: Path) -> Path:
    """A random model that as good as never samples an end token, with room for 8192 tokens: what generates, goes on."""
    import torch

    from hpcrl.quickstart.dialogue import IM_END
    from hpcrl.quickstart.model import new_model
    from hpcrl.quickstart.tokenizer import build_tokenizer

    model = new_model(0)
    model.config.tie_word_embeddings = False
    model.config.max_position_embeddings = 8192
    model = type(model)(model.config)
    with torch.no_grad():
        model.lm_head.weight.mul_(40.0)
        model.lm_head.weight[IM_END] = 0.0  # its logit is 0, the others' largest far above
    model.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


def stage(model: Path, version: str, folder: Path) -> tuple[Path, Path]:
    """What the receiver leaves behind: (manifest file, staging file) of a model directory."""
    from transformers import AutoModelForCausalLM

    from hpcrl.weights.snapshot import Snapshot

    snapshot = Snapshot.of_model(AutoModelForCausalLM.from_pretrained(model))
    snapshot.capture()
    pieces = cut(snapshot.layout.nbytes, 1 << 18)
    chunks = [Chunk(start, size, chunk_digest(snapshot.view[start : start + size])) for start, size in pieces]
    manifest = Manifest.build(
        PolicyVersion.parse(version), None, snapshot.layout, chunks, tokenizer_digest="00", model_config_digest="00"
    )
    manifest_path, staging = folder / f"{version}.json", folder / f"{version}.weights"
    manifest_path.write_text(manifest.to_json())
    staging.write_bytes(snapshot.view)
    return manifest_path, staging


class Client:
    """A harness: a base URL and a key."""

    def __init__(
        self,
        url: str,
        attempt: str,
        version: str = "0.0",
        replica: str = "r0",
        pin: Pin = "trajectory",
        secret: str = SECRET,
    ) -> None:
        self.url = url
        self.secret = secret
        self.key = sign_attempt_key(secret, AttemptKey(attempt, version, replica, pin))
        self.attempt = attempt

    async def post(self, path: str, body: dict[str, Any], key: str | None = None) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {key or self.key}"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url.removesuffix("/v1") + path, json=body, headers=headers) as response,
        ):
            return response.status, await response.json() if response.content_type == "application/json" else {}

    async def chat(self, messages: list[dict[str, Any]], **more: Any) -> tuple[int, dict[str, Any]]:
        return await self.post("/v1/chat/completions", {"model": "policy", "messages": messages, **more})

    async def record(self) -> AttemptRecord:
        status, body = await self.post("/side/record", {"attempt_id": self.attempt}, records_key(self.secret))
        assert status == 200, body
        return AttemptRecord.model_validate(body)


@lru_cache(maxsize=8)
def _loaded(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model)


def forward_logprobs(model: Path, token_ids: list[int]) -> list[float]:
    """log p(token | tokens before) by transformers; 0.0 for the first."""
    import torch

    with torch.no_grad():
        logits = _loaded(model)(torch.tensor([token_ids])).logits[0]
    logprobs = torch.log_softmax(logits.float(), -1)
    return [0.0, *(logprobs[i, token].item() for i, token in enumerate(token_ids[1:]))]
