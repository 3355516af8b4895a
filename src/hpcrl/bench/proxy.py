"""``hpcrl bench proxy``: calls through the recording proxy against the same calls straight to vLLM, in one run, with a small model.

    one stream     a call's seconds, less what the engine took for it (its record)          added_ms_p50, added_ms_p99
                   beside it the same prompt and seed twice straight to vLLM:
                   a call through the proxy less one straight, and the two straight ones    paired_ms_p50, paired_ms_p99, noise_ms_p99
    32 streams     the same calls by 32 callers, tokens per second                          throughput_ratio_32
    a dialogue     10 turns (600, then 200 bytes, and replies of 32);
                   what vLLM counts as found in its prefix cache at the last                prefix_hit_turn10
    long ones      50 turns, 8,000 tokens; as for one stream, the last turn over the first  latency_ratio_turn50
    the proxy      20,000 requests of 400 attempts over an engine that answers at once,
                   records kept for 5 s instead of 300                                      rss_growth, after a quarter of them

The proxy, vLLM and the load are three processes, as in a run. The model is the quickstart's with more positions.

Two generations differ by many times what the proxy adds (16 steps of an engine that shares its cores): a difference of two measures the
engine, as ``noise_ms_p99`` shows. The engine's time of the very same call is what can be taken off exactly; like a straight call's time
it holds one client's HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp

from hpcrl.bench.proxy_server import REPLICA, SECRET, VERSION
from hpcrl.config import dump_config, parse_config
from hpcrl.errors import RunError, UserError
from hpcrl.protocol.keys import AttemptKey, records_key, sign_attempt_key
from hpcrl.protocol.record import AttemptRecord

__all__ = ["PARTS", "measure"]

PARTS = ("calls", "streams", "dialogues", "memory")
"""What can be measured alone."""
_MODEL = Path("models/repair-qwen3")
_CONTEXT = 10_240
_TURN_BYTES = 140
"""One turn of the long dialogues: with its reply and the template about 160 tokens, 8,000 in 50 turns."""
_CALLS = 10
"""Of one attempt in the first part: as many as an agent makes."""
_PATIENCE = aiohttp.ClientTimeout(total=600)

Say = Callable[[str], None]


class _Load:
    """Calls to one proxy and, beside it, to its vLLM."""

    def __init__(
        self, session: aiohttp.ClientSession, proxy: str, engine: aiohttp.ClientSession | None, pid: int
    ) -> None:
        self._session = session
        self._proxy = proxy
        self._direct = engine or session
        self.pid = pid

    async def chat(self, attempt: str, messages: list[dict[str, str]], **more: Any) -> tuple[dict[str, Any], float]:
        """One call through the proxy, and its seconds."""
        key = sign_attempt_key(SECRET, AttemptKey(attempt, VERSION, REPLICA))
        body = {"model": "policy", "messages": messages, **more}
        return await self._post(self._session, f"{self._proxy}/chat/completions", body, key)

    async def direct(self, token_ids: list[int], seed: int | None, max_tokens: int) -> tuple[dict[str, Any], float]:
        """The same generation straight from vLLM, and its seconds."""
        parameters = {"temperature": 1.0, "max_tokens": max_tokens, "logprobs": 0, "detokenize": False}
        if seed is not None:
            parameters["seed"] = seed
        body = {"token_ids": token_ids, "sampling_params": parameters | {"stop_token_ids": [257]}}
        return await self._post(self._direct, "/inference/v1/generate", body, "")

    async def record(self, attempt: str) -> AttemptRecord:
        url = self._proxy.removesuffix("/v1") + "/side/record"
        answer, _ = await self._post(self._session, url, {"attempt_id": attempt}, records_key(SECRET))
        return AttemptRecord.model_validate(answer)

    async def prefix_cache(self) -> tuple[float, float]:
        """Prompt tokens that vLLM looked up in its prefix cache so far, and those it found."""
        async with self._direct.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
        asked, found = (sum(float(line.split()[-1]) for line in lines if line.startswith(name)) for name in names)
        return asked, found

    async def _post(
        self, session: aiohttp.ClientSession, url: str, body: dict[str, Any], key: str
    ) -> tuple[dict[str, Any], float]:
        began = time.perf_counter()
        async with session.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as response:
            answer = await response.json()
            took = time.perf_counter() - began
            if response.status != 200:
                raise RunError(f"bench: {url} answered {response.status}: {answer}")
        return answer, took


def measure(quick: bool, say: Say, only: str | None = None) -> dict[str, float | None]:
    """The numbers of the bench, or of one of its parts (``PARTS``). ``quick``: few calls, to see that it works."""
    if not (_MODEL / "config.json").is_file():
        raise UserError(f"{_MODEL} is not here; run the bench in the repository's root")
    return asyncio.run(_measure(quick, say, PARTS if only is None else (only,)))


async def _measure(quick: bool, say: Say, parts: tuple[str, ...]) -> dict[str, float | None]:
    numbers: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as name:
        folder = Path(name)
        _prepare(folder)
        if set(parts) - {"memory"}:
            async with _served(folder, stub=False) as load:
                say("vLLM and the proxy serve")
                if "calls" in parts:
                    numbers |= await _one_stream(load, 1 if quick else 30)
                if "streams" in parts:
                    numbers["throughput_ratio_32"] = await _throughput(load, 1 if quick else 12)
                say(f"calls: {numbers}")
                if "dialogues" in parts:
                    numbers["prefix_hit_turn10"] = await _prefix_hits(load)
                    numbers["latency_ratio_turn50"] = await _long_dialogues(load, *((1, 5) if quick else (8, 50)))
        if "memory" in parts:
            say("the proxy alone")
            async with _served(folder, stub=True) as load:
                numbers["rss_growth"] = await _memory(load, 400 if quick else 20_000)
    return numbers


def _prepare(folder: Path) -> None:
    model = folder / "model"
    shutil.copytree(_MODEL, model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": _CONTEXT}), encoding="utf-8")
    run = parse_config(
        {
            "model": {"path": str(model)},
            "tasks": {"train": "none"},
            "rollout": {"context_tokens": _CONTEXT, "max_tokens": 64},
            "inference": {"enforce_eager": True, "kv_cache_gib": 1.0, "request_timeout_s": 600.0},
        }
    )
    (folder / "config.yaml").write_text(dump_config(run), encoding="utf-8")


@contextlib.asynccontextmanager
async def _served(folder: Path, stub: bool) -> AsyncIterator[_Load]:
    command = [sys.executable, "-m", "hpcrl.bench.proxy_server", str(folder), *(["--stub"] if stub else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = await asyncio.to_thread(process.stdout.readline) if process.stdout is not None else ""
        if not line.strip():
            raise RunError(f"bench: the server ended with status {process.wait()} before it served; see above")
        urls = json.loads(line)
        async with contextlib.AsyncExitStack() as stack:
            tcp = aiohttp.TCPConnector(limit=0)
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=tcp, timeout=_PATIENCE))
            engine = None
            if urls["engine"] is not None:
                unix = aiohttp.UnixConnector(urls["engine"], limit=0)
                direct = aiohttp.ClientSession("http://vllm", connector=unix, timeout=_PATIENCE)
                engine = await stack.enter_async_context(direct)
            yield _Load(session, urls["proxy"], engine, process.pid)
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)


def _question(number: int, length: int = 120) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{number:08d} ".ljust(length, "x")}]


def _ids(messages: list[dict[str, str]]) -> list[int]:
    """The quickstart template's ids of one question: bytes between its two marks."""
    return [256, *f"user\n{messages[0]['content']}".encode(), 257, *b"\n", 256, *b"assistant\n"]


async def _one_stream(load: _Load, rounds: int) -> dict[str, float]:
    added: list[float] = []
    paired: list[float] = []
    noise: list[float] = []
    for number in range(-1, rounds):  # the first round warms up
        attempt = f"one-{number}"
        took: list[float] = []
        for question in (_question(number * _CALLS + index) for index in range(_CALLS)):
            seed = len(took)
            await load.direct(_ids(question), seed, 16)  # from here on its prompt is in the cache, for all three
            first = (await load.direct(_ids(question), seed, 16))[1]
            took.append((await load.chat(attempt, question, seed=seed, max_tokens=16))[1])
            second = (await load.direct(_ids(question), seed, 16))[1]
            if number >= 0:
                paired.append(1000 * (took[-1] - (first, second)[seed % 2]))
                noise.append(1000 * (second - first))
        if number >= 0:
            requests = (await load.record(attempt)).requests
            added += [1000 * (one - request.generate_s) for one, request in zip(took, requests, strict=True)]
    return {
        "added_ms_p50": _percentile(added, 50),
        "added_ms_p99": _percentile(added, 99),
        "paired_ms_p50": _percentile(paired, 50),
        "paired_ms_p99": _percentile(paired, 99),
        "noise_ms_p99": _percentile(noise, 99),
    }


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


async def _throughput(load: _Load, rounds: int) -> float:
    """Tokens per second of 32 callers through the proxy, over those straight from vLLM; medians of alternating rounds.

    Without seeds: vLLM's engine on CPUs ends when a seeded prompt is computed in more than one piece.
    """

    async def proxied(caller: int, number: int) -> int:
        answer, _ = await load.chat(f"many-{number}-{caller}", _question(number * 64 + caller))
        return int(answer["usage"]["completion_tokens"])

    async def straight(caller: int, number: int) -> int:
        answer, _ = await load.direct(_ids(_question(number * 64 + 32 + caller)), None, 64)
        return len(answer["choices"][0]["token_ids"])

    async def rate(one: Callable[[int, int], Any], number: int) -> float:
        async def caller(index: int) -> int:
            return sum([await one(index, 100 * number + turn) for turn in range(4)])

        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*(caller(index) for index in range(32))))
        return tokens / (time.perf_counter() - began)

    await rate(straight, 99)
    ratios = [await rate(proxied, number) / await rate(straight, number) for number in range(rounds)]
    return statistics.median(ratios)


async def _talk(load: _Load, attempt: str, turns: int, length: int) -> list[float]:
    """A dialogue; the seconds of each turn."""
    messages: list[dict[str, str]] = []
    took = []
    for turn in range(turns):
        messages += _question(turn, length)
        answer, seconds = await load.chat(attempt, messages, seed=turn, max_tokens=8)
        messages.append(answer["choices"][0]["message"])
        took.append(seconds)
    return took


async def _prefix_hits(load: _Load) -> float:
    """Share of the tenth turn's prompt that vLLM found in its cache; as an agent's, the dialogue opens with its longest message."""
    messages: list[dict[str, str]] = []
    before = after = (0.0, 0.0)
    for turn in range(10):
        messages += _question(turn, 200 if turn else 600)
        before = await load.prefix_cache()
        answer, _ = await load.chat("prefix", messages, seed=turn, max_tokens=32)
        after = await load.prefix_cache()
        messages.append(answer["choices"][0]["message"])
    return (after[1] - before[1]) / (after[0] - before[0])


async def _long_dialogues(load: _Load, dialogues: int, turns: int) -> float:
    """What the proxy adds to the last turn, over what it adds to the first: each call's seconds less what its engine took."""
    first: list[float] = []
    last: list[float] = []
    for number in range(dialogues):
        attempt = f"long-{number}"
        took = await _talk(load, attempt, turns, _TURN_BYTES)
        requests = (await load.record(attempt)).requests
        first.append(took[0] - requests[0].generate_s)
        last.append(took[-1] - requests[-1].generate_s)
    return statistics.median(last) / statistics.median(first)


async def _memory(load: _Load, requests: int) -> float:
    """Relative growth of the proxy's resident memory from a quarter of the requests to all of them.

    Records live ``KEPT_S`` after they were taken: from the first quarter on as many go as come.
    """
    per_attempt = 50
    attempts, warm = requests // per_attempt, 0.0
    for number in range(attempts):
        if number == attempts // 4:
            warm = _rss(load.pid)
        attempt = f"memory-{number}"
        await _talk(load, attempt, per_attempt, 20)
        await load.record(attempt)
    return _rss(load.pid) / warm - 1


def _rss(pid: int) -> float:
    """Resident bytes of a process."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return 1024.0 * float(line.split()[1])
    raise RunError(f"bench: process {pid} is gone")
