"""The engine of the benchmark: the real vLLM child with the real plugin, and a client that streams tokens from it.

caller's thread   start, flip, reload_file          event-loop thread   VllmServer
client thread     one stream of tokens after the other, the time of each; a stream that a pause aborts begins anew
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx

from hpcrl.bench.model import DTYPE_BYTES
from hpcrl.config.load import parse_config
from hpcrl.errors import InfraError
from hpcrl.inference.command import SERVED_MODEL
from hpcrl.inference.guard import session_members
from hpcrl.inference.supervisor import Flipped, VllmServer

__all__ = ["Engine", "longest_gap"]

T = TypeVar("T")

_TOKENS = 512
"""Length of one stream; the model's context is twice that."""
_STREAMS = 2
"""Whole contexts that the KV cache holds."""
_PATIENCE_S = 1800.0
"""A busy machine is slow, but what it measures is not the waiting."""


class Engine:
    """One vLLM server with ``threads`` threads that serves the model directory ``model`` as version 0.0. Use as a context manager.

    Its KV cache holds two streams and is filled once at the start: what grows afterwards is not the cache.
    """

    def __init__(self, model: Path, dtype: str, threads: int, log: Path) -> None:
        config = parse_config(
            {
                "model": {"path": str(model), "dtype": dtype},
                "tasks": {"train": "none"},
                "rollout": {"context_tokens": 2 * _TOKENS, "max_tokens": _TOKENS},
                "inference": {
                    "threads": threads,
                    "enforce_eager": True,
                    "kv_cache_gib": _kv_bytes(model, dtype) / 2**30,
                    "max_num_seqs": 4,
                    "start_timeout_s": _PATIENCE_S,
                    "request_timeout_s": _PATIENCE_S,
                },
            }
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="engine", daemon=True).start()
        self._server = VllmServer(config, model, "0.0", log)
        self._http: httpx.Client

    def __enter__(self) -> Engine:
        self._await(self._server.start())
        # One client for all: each one more costs memory that is never given back.
        transport = httpx.HTTPTransport(uds=str(self._server.socket))
        self._http = httpx.Client(transport=transport, base_url="http://vllm", timeout=_PATIENCE_S, trust_env=False)
        for first in range(_STREAMS):
            body = {"model": SERVED_MODEL, "prompt": [first] * (2 * _TOKENS - 1), "max_tokens": 1}
            self._http.post("/v1/completions", json=body).raise_for_status()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self._await(self._server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def flip(self, manifest: Path, staging: Path) -> Flipped:
        """Load a staged version, as a replica does: check the bytes, then pause for them."""
        self._await(self._server.check(manifest, staging))
        return self._await(self._server.flip(manifest, staging))

    def resident(self) -> float:
        """Bytes that the engine's processes have in memory, what they share counted once (PSS)."""
        return sum(_proportional(pid) for pid in session_members(self._server.pid or 0))

    def reload_file(self, directory: Path, fetch: Callable[[], None]) -> None:
        """The file baseline: pause, get the file, vLLM's own reload from ``directory``, resume."""
        self._http.post("/pause?mode=abort&clear_cache=true").raise_for_status()
        fetch()
        reload: dict[str, Any] = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        self._http.post("/collective_rpc", json=reload).raise_for_status()
        self._http.post("/resume").raise_for_status()

    @contextlib.contextmanager
    def client(self) -> Iterator[list[float]]:
        """A client streams tokens inside the block; yields the list of their monotonic times, complete after the block."""
        stop, times = threading.Event(), list[float]()
        thread = threading.Thread(target=self._stream, args=(stop, times), name="client")
        thread.start()
        try:
            _await_tokens(times, 3)
            yield times
            _await_tokens(times, len(times) + 3)
        finally:
            stop.set()
            thread.join()

    def _stream(self, stop: threading.Event, times: list[float]) -> None:
        body = {"model": SERVED_MODEL, "prompt": [1], "max_tokens": _TOKENS, "stream": True, "ignore_eos": True}
        while not stop.is_set():
            with self._http.stream("POST", "/v1/completions", json=body) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {") and '"finish_reason":"abort"' not in line:
                        times.append(time.monotonic())
                    if stop.is_set():
                        break

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _kv_bytes(model: Path, dtype: str) -> int:
    """Keys and values of as many contexts as the cache shall hold, and one block more."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    per_token = 2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * width * DTYPE_BYTES[dtype]
    return int(per_token * (_STREAMS * 2 * _TOKENS + 256))


def _proportional(pid: int) -> int:
    with contextlib.suppress(OSError):  # it may have ended
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)
    return 0


def longest_gap(times: list[float]) -> float:
    """The longest time between two tokens, seconds."""
    return max((after - before for before, after in itertools.pairwise(times)), default=0.0)


def _await_tokens(times: list[float], count: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while len(times) < count:
        if time.monotonic() > deadline:
            raise InfraError(
                "no_tokens", f"the streaming client got {len(times)} tokens in {_PATIENCE_S:g} s, {count} wanted"
            )
        time.sleep(0.005)
