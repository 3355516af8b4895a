"""A real vLLM child behind the real proxy, spoken to as a harness would: over HTTP, in OpenAI's shape."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from replicas import SECRET, Client, Loop, forward_logprobs, save_model, stage

from hpcrl.config.schema import RunConfig
from hpcrl.config.sections import InferenceSection, ModelSection, RolloutSection, TasksSection
from hpcrl.errors import InfraError
from hpcrl.inference.guard import session_members
from hpcrl.inference.proxy import Proxy
from hpcrl.inference.replica import Replica
from hpcrl.protocol.keys import AttemptKey, records_key, sign_attempt_key
from hpcrl.protocol.record import AttemptRecord
from hpcrl.sandbox.procs import children

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two random models with tied embeddings, sharing a tokenizer."""
    return [save_model(tmp_path_factory.mktemp(f"model{seed}"), seed) for seed in (0, 1)]


def configuration(model: Path) -> RunConfig:
    return RunConfig(
        model=ModelSection(path=str(model)),
        tasks=TasksSection(train="unused"),
        rollout=RolloutSection(context_tokens=512, max_tokens=32),
        inference=InferenceSection(enforce_eager=True, kv_cache_gib=0.25, start_timeout_s=400),
    )


def new_replica(model: Path, version: str | None, folder: Path) -> Replica:
    config = configuration(model)
    return Replica(config, secret=SECRET, replica_id="r0", model=model, initial_version=version, log_dir=folder)


async def started(model: Path, version: str | None, folder: Path) -> tuple[Replica, str]:
    replica = new_replica(model, version, folder)
    took = await replica.start()
    print(f"engine start {took:.1f} s")
    return replica, await replica.serve("127.0.0.1")


@pytest.fixture(scope="module")
def served(loop: Loop, models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Replica, str]]:
    folder = tmp_path_factory.mktemp("logs")

    async def start() -> tuple[Replica, str]:
        return await started(models[0], "0.0", folder)

    replica, url = loop.run(start())
    yield replica, url
    loop.run(replica.stop())


async def talk(client: Client, turns: int = 3) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"output of turn {turn}: é"})
        status, body = await client.chat(messages, max_tokens=24)
        assert status == 200, body
        assert set(body) == {"id", "object", "created", "model", "choices", "usage"}
        messages.append(body["choices"][0]["message"])
    return messages


def largest_gap(model: Path, record: AttemptRecord) -> float:
    expected = forward_logprobs(model, record.token_ids)
    pairs = zip(record.logprobs, expected, record.loss_mask, strict=True)
    return max(abs(recorded - computed) for recorded, computed, mask in pairs if mask)


def test_dialogue_is_recorded_token_exactly(loop: Loop, served: tuple[Replica, str], models: list[Path]) -> None:
    from hpcrl.inference.tokenizer import HFTokenizer

    client = Client(served[1], "dialogue")
    messages = loop.run(talk(client))
    record = loop.run(client.record())
    assert record.messages == messages
    assert record.segments == [0]
    assert len(record.requests) == 3
    assert sum(record.loss_mask) == sum(span.end - span.start for span in record.version_spans) > 0
    assert {span.version for span in record.version_spans} == {"0.0"}
    for request in record.requests:
        assert request.ending in ("stop", "length")
        assert all(record.loss_mask[request.start : request.end])
        assert request.engine is not None
        parts = request.engine.queue_s, request.engine.prefill_s, request.engine.decode_s
        assert min(parts) >= 0 and request.engine.prefill_s > 0 and sum(parts) <= request.generate_s
    assert all(math.isfinite(value) and value <= 0 for value in record.logprobs)
    assert largest_gap(models[0], record) < 1e-4
    first = HFTokenizer(models[0])
    prompt = first.encode(first.render(messages[:1], True))
    assert record.token_ids[: len(prompt)] == prompt
    assert loop.run(client.record()) == record
    status, body = loop.run(client.chat(messages))
    assert (status, body["error"]["code"]) == (409, "attempt_closed")


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_recorded_logprobs_are_those_that_the_trainer_computes(
    loop: Loop, served: tuple[Replica, str], models: list[Path], temperature: float
) -> None:
    import torch

    from hpcrl.inference.tokenizer import HFTokenizer
    from hpcrl.protocol.messages import Lease, Sampling, ScoredAttempt
    from hpcrl.protocol.version import PolicyVersion
    from hpcrl.trainer.batch import pack, sequences_of
    from hpcrl.trainer.model import Policy
    from hpcrl.trajectory import from_record

    config = configuration(models[0])
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"temperature": temperature})})
    proxy = Proxy(config, SECRET, "r0", served[0], HFTokenizer(models[0]))
    names = {"attempt_id": "g0-r0-a0", "rollout_id": "g0-r0", "group_id": "g0", "task_id": "t", "split": "train"}
    key = sign_attempt_key(SECRET, AttemptKey("g0-r0-a0", "0.0", "r0", "trajectory"))

    async def dialogue() -> AttemptRecord:
        transport = httpx.ASGITransport(app=proxy.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
            messages: list[dict[str, Any]] = []
            for turn in range(4):
                messages.append({"role": "user", "content": f"turn {turn}"})
                headers = {"Authorization": f"Bearer {key}"}
                answer = await client.post("/v1/chat/completions", json={"messages": messages}, headers=headers)
                messages.append(answer.json()["choices"][0]["message"])
            headers = {"Authorization": f"Bearer {records_key(SECRET)}"}
            answer = await client.post("/side/record", json={"attempt_id": "g0-r0-a0"}, headers=headers)
            return AttemptRecord.model_validate(answer.json())

    record = loop.run(dialogue())
    assert {request.sampling.temperature for request in record.requests} == {temperature}
    lease = Lease(
        **names,
        task_dir="/t",
        policy_version="0.0",
        replica_id="r0",
        base_url="",
        api_key=key,
        sampling=Sampling(temperature=temperature),
        deadline_at=0.0,
    )
    score = ScoredAttempt(attempt_id="g0-r0-a0", reward=1.0, rewards={}, verifier_version="v", scoring_s=0.0)
    trajectory = from_record(lease, record, score, run_id="run", environment_version="e")
    policy = Policy.load(models[0], "float32", torch.device("cpu"), temperature)
    gaps = []
    with torch.no_grad():
        for batch in pack(sequences_of(trajectory, 1.0, PolicyVersion(0, 0)), 4096):
            gaps.append((policy.logprobs(batch)[0] - batch.behaviour).abs())
    found = torch.cat(gaps)
    print(f"temperature {temperature}: {len(found)} tokens, largest |trainer - recorded| {found.max():.1e}")
    assert len(found) == trajectory.trained_tokens > 20 and found.max() <= 2e-3


def test_refusals_name_the_cause(loop: Loop, served: tuple[Replica, str]) -> None:
    url = served[1]
    question = [{"role": "user", "content": "x"}]

    async def codes() -> list[tuple[int, str]]:
        answers = [
            await Client(url, "a", version="0.9").chat(question),
            await Client(url, "a", replica="r1").chat(question),
            await Client(url, "a").chat(question, temperature=0.5),
            await Client(url, "a").chat(question, top_k=5),
            await Client(url, "a").chat(question, tool_choice="required"),
            await Client(url, "a").chat([{"role": "user", "content": "x" * 600}]),
            await Client(url, "a").post("/v1/chat/completions", {"messages": question}, key="sk-wrong.key"),
            await Client(url, "a").post("/side/record", {"attempt_id": "a"}),
            await Client(url, "a").post("/side/record", {"attempt_id": "never"}, records_key(SECRET)),
        ]
        return [(status, body["error"]["code"]) for status, body in answers]

    assert loop.run(codes()) == [
        (409, "stale_version"),
        (403, "wrong_replica"),
        (400, "temperature_fixed"),
        (400, "unknown_parameter"),
        (400, "unsupported_value"),
        (400, "context_length_exceeded"),
        (401, "bad_key"),
        (401, "bad_key"),
        (404, "unknown_attempt"),
    ]


def test_client_that_leaves_cancels_its_generation(loop: Loop, served: tuple[Replica, str]) -> None:
    replica, url = served
    client = Client(url, "leaves")

    async def leave() -> AttemptRecord:
        for _ in range(20):
            call = asyncio.create_task(client.chat([{"role": "user", "content": "x"}]))
            while not replica.active_requests and not call.done():
                await asyncio.sleep(0.001)
            call.cancel()
            if await asyncio.gather(call, return_exceptions=True) and call.cancelled():
                break
        while replica.active_requests:
            await asyncio.sleep(0.01)
        return await client.record()

    record = loop.run(leave())
    assert record.requests[-1].ending == "client_cancelled"
    assert record.requests[-1].start == record.requests[-1].end


def test_kv_use_is_what_running_generations_hold(loop: Loop, served: tuple[Replica, str]) -> None:
    replica, url = served

    async def look() -> list[float | None]:
        asked = [{"role": "user", "content": "x" * 200}]
        calls = [asyncio.create_task(Client(url, f"kv-{index}").chat(asked)) for index in range(16)]
        found = []
        while not all(call.done() for call in calls):
            found.append(await replica.kv_use())
        return found

    began = time.monotonic()
    seen = [use for use in loop.run(look()) if use is not None]
    print(f"{len(seen)} samples in {time.monotonic() - began:.2f} s beside 16 generations, highest {max(seen):.4f}")
    assert 0.0 < max(seen) <= 1.0 and min(seen) >= 0.0


def test_throughput_with_32_callers(loop: Loop, served: tuple[Replica, str]) -> None:
    async def caller(index: int) -> None:
        await talk(Client(served[1], f"load-{index}"), turns=3)

    async def all_callers() -> float:
        began = time.monotonic()
        await asyncio.gather(*(caller(index) for index in range(32)))
        return time.monotonic() - began

    took = loop.run(all_callers())
    print(f"96 calls by 32 callers in {took:.2f} s: {96 / took:.0f} calls/s, process CPU shared with the client")
    assert took < 60


def test_seeds_are_honoured_and_end_no_engine(loop: Loop, served: tuple[Replica, str]) -> None:
    """More prompt tokens at once than vLLM computes in one step: it must not compute one of them in pieces."""
    replica, url = served

    async def say(attempt: str, seed: int) -> str:
        question = [{"role": "user", "content": f"{seed:03d} ".ljust(440, "x")}]
        status, body = await Client(url, attempt).chat(question, seed=seed, max_tokens=16)
        assert status == 200, body
        return str(body["choices"][0]["message"]["content"])

    async def all_of(name: str) -> list[str]:
        return await asyncio.gather(*(say(f"seed-{name}-{seed}", seed) for seed in range(24)))

    first, again = loop.run(all_of("first")), loop.run(all_of("again"))
    assert again == first and len(set(first)) > 1
    assert replica.restarts == 0


def test_flip_serves_the_new_weights(
    loop: Loop, served: tuple[Replica, str], models: list[Path], tmp_path: Path
) -> None:
    replica, url = served
    loop.run(talk(Client(url, "warms-the-prefix-cache"), turns=1))
    manifest, staging = stage(models[1], "0.1", tmp_path)
    flipped = loop.run(replica.flip("0.1", manifest, staging))
    print(f"pause {flipped.pause_s * 1000:.0f} ms, of which loading {flipped.load_s * 1000:.0f} ms")
    assert replica.served_version == "0.1"
    client = Client(url, "after-flip", version="0.1")
    loop.run(talk(client))
    record = loop.run(client.record())
    assert {span.version for span in record.version_spans} == {"0.1"}
    assert largest_gap(models[1], record) < 1e-4
    status, body = loop.run(Client(url, "bound-to-old").chat([{"role": "user", "content": "x"}]))
    assert (status, body["error"]["code"]) == (409, "stale_version")

    staging.write_bytes(b"\x00" + staging.read_bytes()[1:])
    with pytest.raises(InfraError, match=r"flip_refused.*0\.1 goes on serving"):
        loop.run(replica.flip("0.1", manifest, staging))
    loop.run(talk(Client(url, "after-refusal", version="0.1"), turns=1))
    assert replica.restarts == 0


def test_flipped_engine_equals_a_fresh_one(
    loop: Loop, served: tuple[Replica, str], models: list[Path], tmp_path: Path
) -> None:
    replica, _ = served
    manifest, staging = stage(models[1], "0.2", tmp_path)
    loop.run(replica.flip("0.2", manifest, staging))

    async def sample(which: Replica) -> list[tuple[int, float]]:
        from hpcrl.protocol.messages import Sampling

        prompt = [256, *b"user\nhello", 257, *b"\n", 256, *b"assistant\n"]
        generated = await which.generate("0.2", prompt, Sampling(max_tokens=32), [257], seed=7)
        return list(zip(generated.token_ids, generated.logprobs, strict=True))

    async def fresh() -> list[tuple[int, float]]:
        other = new_replica(models[1], "0.2", tmp_path)
        await other.start()
        try:
            return await sample(other)
        finally:
            await other.stop()

    expected, found = loop.run(fresh()), loop.run(sample(replica))
    assert [token for token, _ in found] == [token for token, _ in expected]
    assert max(abs(a - b) for (_, a), (_, b) in zip(found, expected, strict=True)) < 1e-5


def test_killed_engine_is_replaced_and_reloaded(
    loop: Loop, served: tuple[Replica, str], models: list[Path], tmp_path: Path
) -> None:
    replica, url = served
    manifest, staging = stage(models[1], "0.3", tmp_path)
    loop.run(replica.flip("0.3", manifest, staging))
    guard = replica._engines.server(0).pid
    assert guard is not None
    (api_server,) = children(guard)
    began = time.monotonic()
    os.kill(api_server, signal.SIGKILL)
    while replica.restarts == 0 and time.monotonic() - began < 120:
        time.sleep(0.02)
    print(f"death noticed after {time.monotonic() - began:.2f} s")
    assert replica.restarts == 1
    assert session_members(guard) == []

    async def back() -> AttemptRecord:
        while True:
            client = Client(url, f"after-death-{time.monotonic()}", version="0.3")
            status, _ = await client.chat([{"role": "user", "content": "x"}])
            if status == 200:
                return await client.record()
            assert status == 503

    record = loop.run(back())
    assert {span.version for span in record.version_spans} == {"0.3"}
    assert largest_gap(models[1], record) < 1e-4
