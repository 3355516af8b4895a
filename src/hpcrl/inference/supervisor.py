"""The vLLM server of a replica: start, health, generation by token ids, flips between versions, end.

    down ── start() ──▶ serving ── flip() ──▶ flipping ──▶ serving (new version)
     ▲                     │                      ├── refused before the model changed ──▶ serving (old version)
     │                     │                      └── any other failure ──▶ broken: serves nothing until a flip works
     └──── child ends ─────┴──────────────────────────────────┘            (wait_dead() returns)

Every pause clears KV and prefix cache: nothing computed with the old weights is reused. What generates meanwhile is, by
``weights.pin``, aborted (trajectory), awaited (turn), or frozen and continued with its KV computed anew (token).
Adapters pause nothing: ``load_adapter`` and ``drop_adapter`` work beside the generations of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hpcrl.config.schema import RunConfig
from hpcrl.errors import ConfigError, DataError, InfraError
from hpcrl.inference.child import Child, last_lines, socket_folder
from hpcrl.inference.command import SERVED_MODEL, check_context, server_arguments, server_environment
from hpcrl.inference.unix_http import Refused, UnixHttp
from hpcrl.protocol.messages import Sampling
from hpcrl.protocol.record import EngineTimes
from hpcrl.weights.manifest import Manifest
from hpcrl.weights.vllm_engine import UNTOUCHED, check_staged, update_info

__all__ = ["Flipped", "Generated", "TokenSpan", "VllmServer"]

_PAUSE = {"trajectory": "abort", "turn": "wait", "token": "keep"}
_POLL_S = 0.25
_CONTROL_TIMEOUT_S = 600.0
"""Longest answer to a control call; a pause that awaits running generations has theirs beside it."""
_METRICS_TIMEOUT_S = 10.0
_KV_USE = "vllm:kv_cache_usage_perc"
_NO_VERSION = "none"
_CLAMPED = -9999.0
"""vLLM writes NaN and -inf as this: no logprob of a sampled token."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Sampled tokens ``[start, end)`` came from ``version``."""

    start: int
    end: int
    version: str


@dataclass(frozen=True, slots=True)
class Generated:
    """One generation: ids and natural-log probabilities of the distribution sampled from, equally long."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    spans: list[TokenSpan]
    times: EngineTimes | None = None


@dataclass(frozen=True, slots=True)
class Flipped:
    """What a flip took, in seconds: ``pause_s`` without generation, ``load_s`` loading the weights and comparing what is held."""

    version: str
    pause_s: float
    load_s: float


class VllmServer:
    """One vLLM child. Not reusable after :meth:`stop`; use from one event loop.

    ``version`` names the weights in ``model``; None: they are only a mould, nothing is served before the first flip.
    Raises ConfigError when the model cannot hold the configured context.
    """

    def __init__(
        self, config: RunConfig, model: Path, version: str | None, log: Path, *, gpu: bool | None = None
    ) -> None:
        self._config = config
        self._model = model
        self._log = log
        self._gpu = _has_gpu() if gpu is None else gpu
        self._child: Child | None = None
        self._http: UnixHttp | None = None
        self._folder: TemporaryDirectory[str] | None = None
        self._serving = False
        self.served_version = version
        check_context(_read_config(model), config.rollout.context_tokens)

    @property
    def serving(self) -> bool:
        """Whether generation is allowed now: started, not flipping, not broken, not dead."""
        return self._serving and self._child is not None and self._child.status is None

    @property
    def pid(self) -> int | None:
        """Leader of the child's session."""
        return None if self._child is None else self._child.pid

    @property
    def socket(self) -> Path:
        """Where vLLM itself listens, for measurements beside the proxy. Raises InfraError when it was not started."""
        return self._connection().path

    async def start(self, environ: Mapping[str, str] | None = None) -> float:
        """Start vLLM and wait for its first answer; returns the seconds it took.

        Raises InfraError("engine_start") with the log's last lines when it ends early or exceeds ``inference.start_timeout_s``.
        """
        began = time.monotonic()
        self._folder = socket_folder()
        path = Path(self._folder.name) / "http"
        self._child = await Child.start(
            server_arguments(self._config, self._model, path, gpu=self._gpu),
            server_environment(os.environ if environ is None else environ, self._config, gpu=self._gpu),
            self._log,
        )
        self._http = UnixHttp(path)
        try:
            async with asyncio.timeout(self._config.inference.start_timeout_s):
                await self._until_healthy()
                if self._config.lora is None:
                    await self._control("/init_weight_transfer_engine", {"init_info": {}})
                await self._control("/update_weight_version", {"new_version": self.served_version or _NO_VERSION})
                # The first call is slow: before any real one, and not bounded like them.
                await self._generate([0], Sampling(max_tokens=1), [], None, self._config.inference.start_timeout_s)
        except TimeoutError as error:
            await self.stop()
            raise InfraError(
                "engine_start",
                f"vLLM did not answer within inference.start_timeout_s ({self._config.inference.start_timeout_s:g} s); "
                f"the end of {self._log}:\n{last_lines(self._log)}",
            ) from error
        except BaseException:
            await self.stop()
            raise
        self._serving = self.served_version is not None
        return time.monotonic() - began

    async def generate(
        self,
        token_ids: list[int],
        sampling: Sampling,
        stop_token_ids: list[int],
        *,
        adapter: str | None = None,
        **more: Any,
    ) -> Generated:
        """Sample a continuation of ``token_ids``, with the adapter of version ``adapter`` where adapters are served.

        ``more`` are further vLLM sampling parameters (seed, stop).

        Cancelling the call aborts the generation. Raises InfraError (engine_refused, engine_unreachable,
        generation_timeout), DataError when the answer lacks ids, finite logprobs or versions.
        """
        timeout_s = self._config.inference.request_timeout_s
        return await self._generate(token_ids, sampling, stop_token_ids, adapter, timeout_s, **more)

    async def _generate(
        self,
        token_ids: list[int],
        sampling: Sampling,
        stop_token_ids: list[int],
        adapter: str | None,
        timeout_s: float,
        **more: Any,
    ) -> Generated:
        parameters: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "logprobs": 0,
            "stop_token_ids": stop_token_ids,
            "detokenize": bool(more.get("stop")),
            **more,
        }
        body = {"model": adapter or SERVED_MODEL, "token_ids": token_ids, "sampling_params": parameters}
        try:
            answer = await self._connection().post("/inference/v1/generate", body, timeout_s)
        except TimeoutError as error:
            raise InfraError("generation_timeout", f"no answer from vLLM within {timeout_s:g} s") from error
        return _read_generated(answer, adapter)

    async def check(self, manifest: Path, staging: Path) -> None:
        """Compare staged bytes with their manifest; whatever is served goes on meanwhile. Raises InfraError("flip_refused")."""
        try:
            await asyncio.to_thread(check_staged, manifest, staging)
        except DataError as error:
            raise InfraError("flip_refused", f"{manifest.stem} was refused, {self._goes_on()}: {error}") from error

    async def flip(self, manifest: Path, staging: Path) -> Flipped:
        """Serve the version of ``manifest``, whose bytes lie in ``staging`` and were checked (:meth:`check`).

        Raises InfraError("flip_refused") when the old version goes on serving, InfraError("flip_failed") when nothing is
        served any more until another flip succeeds.
        """
        version = self._version_of(manifest)
        self._serving, was_serving = False, self._serving
        try:
            # It changes nothing yet, and is answered between two steps of the engine: the pause begins there, not within a long step.
            await self._control("/start_weight_update")
            began = time.monotonic()
            pause = f"/pause?mode={_PAUSE[self._config.weights.pin]}&clear_cache=true"
            await self._control(pause, timeout_s=_CONTROL_TIMEOUT_S + self._config.inference.request_timeout_s)
            loading = time.monotonic()
            if self._config.weights.pin == "turn":
                began = loading  # until here the running calls went on
            await self._control("/update_weights", {"update_info": update_info(manifest, staging)})
            await self._control("/finish_weight_update", {"weight_version": version})
            load_s = time.monotonic() - loading
            await self._check_version(version)
            await self._control("/resume")
        except InfraError as error:
            raise await self._flip_error(version, was_serving, error) from error
        self.served_version = version
        self._serving = True
        return Flipped(version, time.monotonic() - began, load_s)

    async def load_adapter(self, version: str, manifest: Path, directory: Path) -> float:
        """Serve an adapter under the name of its version, beside those loaded before; returns the seconds it took.

        Nothing is paused, but the engine's loop does nothing else meanwhile. Raises InfraError("adapter_refused") when what is held
        is not what ``manifest`` says; it is not loaded then. Any other InfraError leaves the engine in doubt.
        """
        began = time.monotonic()
        try:
            await self._control("/v1/load_lora_adapter", {"lora_name": version, "lora_path": str(directory)})
        except Refused as error:
            raise InfraError("adapter_refused", f"vLLM did not load adapter {version}: {error}") from error
        found = await self._workers("hpcrl_check_adapter", str(manifest), str(directory))
        if found:
            await self._control("/v1/unload_lora_adapter", {"lora_name": version})
            raise InfraError("adapter_refused", found)
        self.served_version = version
        self._serving = True
        return time.monotonic() - began

    async def drop_adapter(self, version: str) -> None:
        """No longer serve an adapter; nothing may generate with it any more. Any InfraError leaves the engine in doubt."""
        await self._control("/v1/unload_lora_adapter", {"lora_name": version})
        found = await self._workers("hpcrl_drop_adapter", version)
        if found:
            raise InfraError("adapter_failed", found)

    async def kv_use(self) -> float | None:
        """The share of its KV cache that running generations hold, as vLLM's metrics say; None when they do not, or it is away."""
        try:
            text = await self._connection().text("/metrics", _METRICS_TIMEOUT_S)
        except (InfraError, TimeoutError):
            return None
        found = [float(line.split()[-1]) for line in text.splitlines() if line.startswith(_KV_USE)]
        return max(found, default=None)

    async def wait_dead(self) -> str:
        """Wait until the child has ended; returns a line that says how, with the log's last lines."""
        if self._child is None:
            raise InfraError("engine_down", "vLLM was not started")
        status = await self._child.wait()
        self._serving = False
        return f"vLLM ended with status {status}; the end of {self._log}:\n{last_lines(self._log)}"

    async def stop(self) -> None:
        """End the child and all its processes. May be called at any time, more than once."""
        self._serving = False
        http, self._http = self._http, None  # first: a call must not meet a closed session
        if http is not None:
            await http.close()
        if self._child is not None:
            await self._child.stop()
        if self._folder is not None:
            self._folder.cleanup()

    async def _until_healthy(self) -> None:
        child, http = self._child, self._connection()
        while child is not None:
            if child.status is not None:
                raise InfraError(
                    "engine_start",
                    f"vLLM ended with status {child.status} while starting; the end of {self._log}:\n{last_lines(self._log)}",
                )
            with contextlib.suppress(InfraError, TimeoutError):
                await http.get("/health", timeout_s=5.0)
                return
            await asyncio.sleep(_POLL_S)

    def _connection(self) -> UnixHttp:
        if self._http is None:
            raise InfraError("engine_down", "vLLM is not running")
        return self._http

    async def _control(
        self, path: str, body: dict[str, Any] | None = None, timeout_s: float = _CONTROL_TIMEOUT_S
    ) -> dict[str, Any]:
        try:
            return await self._connection().post(path, body, timeout_s)
        except TimeoutError as error:
            raise InfraError("engine_unreachable", f"no answer from vLLM to {path} in {timeout_s:g} s") from error

    async def _workers(self, method: str, *arguments: str) -> str:
        """Call a method of ``weights/vllm_adapter.py`` in all workers; the first error they report, or nothing."""
        answer = await self._control("/collective_rpc", {"method": method, "args": list(arguments)})
        return next((result["error"] for result in answer["results"] if result["error"]), "")

    async def _check_version(self, version: str) -> None:
        try:
            held = (await self._connection().get("/weight_info", _CONTROL_TIMEOUT_S)).get("weight_version")
        except TimeoutError as error:
            raise InfraError("engine_unreachable", "no answer from vLLM about the version that it holds") from error
        if held != version:
            raise InfraError("flip_failed", f"vLLM says that it holds version {held!r} after loading {version}")

    def _version_of(self, manifest: Path) -> str:
        try:
            return Manifest.from_json(manifest.read_bytes()).version
        except (OSError, DataError) as error:
            raise InfraError("flip_refused", f"manifest {manifest}: {error}") from error

    async def _flip_error(self, version: str, was_serving: bool, error: InfraError) -> InfraError:
        """Resume the old version if the model still holds it; the error to raise in either case."""
        if isinstance(error, Refused) and f"{UNTOUCHED}: " in error.text and was_serving:
            try:
                await self._control("/resume")
            except InfraError as second:
                return InfraError("flip_failed", f"version {version}: {error}; then resuming the old one: {second}")
            self._serving = True
            return InfraError("flip_refused", f"version {version} was refused, {self._goes_on()}: {error}")
        return InfraError("flip_failed", f"version {version}: {error}")

    def _goes_on(self) -> str:
        return f"{self.served_version} goes on serving" if self.serving else "nothing is served"


def _read_generated(answer: dict[str, Any], adapter: str | None = None) -> Generated:
    """Check vLLM's answer: every token with a finite logprob, spans that cover all tokens. Raises DataError.

    vLLM's spans are those of the whole model's weights. With adapters these never change: one span, and ``model`` is the adapter used.
    """
    try:
        choice = answer["choices"][0]
        token_ids: list[int] = choice["token_ids"] or []
        entries = (choice["logprobs"] or {}).get("content") or []
        spans = [TokenSpan(s["start"], s["end"], s["version"]) for s in choice["weight_versions"] or []]
        finish_reason = choice["finish_reason"] or "error"
        if adapter is not None:
            spans = [TokenSpan(s.start, s.end, str(answer["model"])) for s in spans]
        logprobs = [float(entry["logprob"]) for entry in entries]
        named = [entry["token_id"] for entry in entries]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DataError("engine_answer", f"vLLM's answer lacks ids, logprobs or versions: {error!r}") from error
    if named != token_ids:
        raise DataError(
            "engine_answer", f"{len(token_ids)} sampled ids but logprobs for {len(named)} (or other) tokens"
        )
    if any(not math.isfinite(value) or value <= _CLAMPED for value in logprobs):
        raise DataError("engine_answer", "a sampled token has no finite logprob: the weights may contain NaN")
    if [s.start for s in spans] + [len(token_ids)] != [0] + [s.end for s in spans] and token_ids:
        raise DataError("engine_answer", f"version spans {spans} do not cover {len(token_ids)} tokens")
    if adapter is not None and {(s.start, s.version) for s in spans} - {(0, adapter)}:
        raise DataError("engine_answer", f"asked for adapter {adapter}, answered by {spans}")
    return Generated(token_ids, logprobs, finish_reason, spans, _read_times(answer.get("metrics")))


def _read_times(metrics: Any) -> EngineTimes | None:
    """What ``vllm_timings.py`` put into the answer; None when a part is missing: no token was sampled."""
    names = ("queue_time_ms", "time_to_first_token_ms", "generation_time_ms")
    parts = [metrics.get(name) if isinstance(metrics, dict) else None for name in names]
    queue, prefill, decode = parts
    if queue is None or prefill is None or decode is None:
        return None
    return EngineTimes(queue_s=queue / 1000, prefill_s=prefill / 1000, decode_s=decode / 1000)


def _read_config(model: Path) -> dict[str, Any]:
    path = model / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path: cannot read {path}: {error}; expected a Hugging Face model directory"
        ) from error


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
