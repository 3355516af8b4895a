"""Adapters in a real vLLM: each version under its own name, beside the others; compared with forward passes of the merged models."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from replicas import SECRET, Loop, forward_logprobs, save_model
from test_weight_flips import CALLERS, Load, check_spans

from hpcrl.config.schema import (
    InferenceSection,
    LoraSection,
    ModelSection,
    RolloutSection,
    RunConfig,
    TasksSection,
    WeightsSection,
)
from hpcrl.errors import InfraError
from hpcrl.inference.adapters import Adapters
from hpcrl.inference.replica import Replica
from hpcrl.inference.supervisor import Flipped
from hpcrl.protocol.messages import Sampling
from hpcrl.protocol.version import PolicyVersion
from hpcrl.trainer.lora import adapter_tensors, add_adapters, merged_state
from hpcrl.weights.adapter import peft_config
from hpcrl.weights.adapter_store import AdapterStore
from hpcrl.weights.digest import chunk_digest
from hpcrl.weights.manifest import Adapter, Chunk, Manifest, cut
from hpcrl.weights.snapshot import Snapshot

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3000)]

LORA = LoraSection(rank=6, alpha=12.0)
"""A rank between those that vLLM has room for, a scaling that is not 1, every kind of layer (fused and plain)."""
SLOTS = 3
PUBLISHES = 20
ADAPTERS = 4


class Trained:
    """A base model and ADAPTERS adapters on it, the first one at its start (B = 0): what a trainer publishes, and merged copies."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.folder = folder
        self.base = save_model(folder / "base", 0)
        self.merged: list[Path] = []
        self._snapshots: list[tuple[Snapshot, list[Chunk]]] = []
        generator = torch.Generator().manual_seed(7)
        for number in range(ADAPTERS):
            model = AutoModelForCausalLM.from_pretrained(self.base)
            add_adapters(model, LORA, number)
            for name, tensor in adapter_tensors(model):
                if number and ".lora_B." in name:
                    tensor.data.normal_(std=0.05, generator=generator)
            self.merged.append(folder / f"merged{number}")
            model.save_pretrained(self.merged[-1], state_dict=merged_state(model))
            snapshot = Snapshot(lambda model=model: adapter_tensors(model))
            snapshot.capture()
            pieces = cut(snapshot.layout.nbytes, 1 << 14)
            chunks = [Chunk(start, size, chunk_digest(snapshot.view[start : start + size])) for start, size in pieces]
            self._snapshots.append((snapshot, chunks))

    def stage(self, version: str) -> tuple[Path, Path]:
        """(manifest file, staging file) of version k: adapter k % ADAPTERS, in one of two files by turns as in the double buffer."""
        step = PolicyVersion.parse(version).step
        snapshot, chunks = self._snapshots[step % ADAPTERS]
        adapter = Adapter(peft_config(str(self.base), LORA.rank, LORA.alpha, LORA.target_modules), "00")
        manifest = Manifest.build(
            PolicyVersion.parse(version),
            None,
            snapshot.layout,
            chunks,
            tokenizer_digest="00",
            model_config_digest="00",
            adapter=adapter,
        )
        path, staging = self.folder / f"{version}.json", self.folder / f"slot{step % 2}.weights"
        path.write_text(manifest.to_json())
        staging.write_bytes(snapshot.view)
        return path, staging


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterStore]:
    with AdapterStore("test", "r0", tmp_path_factory.mktemp("shm")) as store:
        yield store


@pytest.fixture(scope="module")
def replica(
    loop: Loop, trained: Trained, store: AdapterStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replica]:
    """Serves 0.0 and 0.1."""

    async def made() -> Replica:
        config = RunConfig(
            model=ModelSection(path=str(trained.base)),
            lora=LORA,
            tasks=TasksSection(train="unused"),
            rollout=RolloutSection(context_tokens=512, max_tokens=160),
            inference=InferenceSection(
                enforce_eager=True, kv_cache_gib=0.25, start_timeout_s=1400, request_timeout_s=300
            ),
            weights=WeightsSection(slots=SLOTS),
        )
        replica = Replica(
            config,
            secret=SECRET,
            replica_id="r0",
            model=trained.base,
            initial_version=None,
            log_dir=tmp_path_factory.mktemp("logs"),
            adapters=store,
        )
        await replica.start()
        assert not replica.serving
        for version, keep in (("0.0", []), ("0.1", ["0.0"])):
            await replica.flip(version, *trained.stage(version), keep)
        return replica

    replica = loop.run(made())
    yield replica
    loop.run(replica.stop())


def held(replica: Replica) -> list[str]:
    assert isinstance(replica._engines, Adapters)
    return replica._engines.held


async def largest_gap(replica: Replica, trained: Trained, version: str) -> float:
    """20 prompts that share their beginning: the largest distance of a served logprob from the merged model's."""
    merged = trained.merged[PolicyVersion.parse(version).step % ADAPTERS]
    gap = 0.0
    for number in range(20):
        prompt = [256, *b"user\nthe same long beginning of every prompt, then ", *b"%d" % number, 257, 256]
        generated = await replica.generate(version, prompt, Sampling(max_tokens=24), [257], seed=number)
        assert {span.version for span in generated.spans} == {version}
        expected = forward_logprobs(merged, prompt + generated.token_ids)[len(prompt) :]
        gap = max(gap, *(abs(a - b) for a, b in zip(generated.logprobs, expected, strict=True)))
    return gap


def test_two_versions_answer_at_the_same_time_as_the_trainers_merged_models(
    loop: Loop, replica: Replica, trained: Trained
) -> None:
    prompt = [256, *b"user\nhow far apart are they?", 257]
    apart = zip(*(forward_logprobs(merged, prompt) for merged in trained.merged[:2]), strict=True)
    assert max(abs(a - b) for a, b in apart) > 0.1  # else the wrong adapter would not be noticed

    async def both() -> list[float]:
        return await asyncio.gather(*(largest_gap(replica, trained, version) for version in ("0.0", "0.1")))

    gaps = loop.run(both())
    print(f"largest difference of a logprob: {gaps[0]:.1e} (0.0), {gaps[1]:.1e} (0.1)")
    assert max(gaps) <= 1e-4


def test_a_dead_engines_successor_serves_the_live_adapters_again(
    loop: Loop, replica: Replica, trained: Trained
) -> None:
    async def story() -> list[float]:
        pid = replica._engines.server(0).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while replica.restarts == 0 or not replica.serving:
            await asyncio.sleep(0.05)
        return [await largest_gap(replica, trained, version) for version in ("0.0", "0.1")]

    assert max(loop.run(story())) <= 1e-4
    assert (held(replica), replica.served_version) == (["0.0", "0.1"], "0.1")


def test_what_is_not_the_published_adapter_is_refused_and_the_others_are_served(
    loop: Loop, replica: Replica, trained: Trained, store: AdapterStore
) -> None:
    """Bytes that changed on the way; a module that vLLM has no layer for; an adapter in the worker that nobody published."""

    async def refused(manifest: Path, staging: Path, reason: str, *keep: str) -> None:
        with pytest.raises(InfraError, match=reason):
            await replica.flip("0.2", manifest, staging, keep)
        for version in (*keep, "0.1"):
            assert await largest_gap(replica, trained, version) <= 1e-4

    async def story() -> None:
        manifest, staging = trained.stage("0.2")
        content = bytearray(staging.read_bytes())
        content[100] ^= 1
        staging.write_bytes(content)
        await refused(manifest, staging, r"staged_weights: version 0\.2: the chunk at byte 0 differs", "0.0")

        manifest, staging = trained.stage("0.2")
        described = Manifest.from_json(manifest.read_bytes())
        named = [replace(entry, name=entry.name.replace("layers.3.", "layers.9.")) for entry in described.tensors]
        manifest.write_text(replace(described, tensors=tuple(named)).to_json())
        await refused(manifest, staging, r"held_adapter: .* no linear layer has taken model\.layers\.9\.", "0.0")

        stranger = store.root / "stranger"
        shutil.copytree(store.root / "0.1", stranger)  # in the place of 0.0, which nobody needs any more
        server = replica._engines.server(0)
        await server._control("/v1/load_lora_adapter", {"lora_name": "stranger", "lora_path": str(stranger)})
        await refused(*trained.stage("0.2"), "the worker has 2 new adapters")

    loop.run(story())
    assert (held(replica), replica.served_version, replica.restarts) == (["0.1"], "0.1", 1)
    assert sorted(path.name for path in store.root.iterdir()) == ["0.1", "stranger"]


def test_20_publishes_under_load_lose_no_request_and_none_has_a_wrong_version(
    loop: Loop, replica: Replica, trained: Trained
) -> None:
    async def story() -> tuple[Load, list[Flipped]]:
        load = Load(await replica.serve("127.0.0.1"), replica, "trajectory", turns=3, max_tokens=32)
        callers = [asyncio.create_task(load.caller(number)) for number in range(CALLERS)]
        flips = []
        for step in range(2, 2 + PUBLISHES):
            while len(needed := {f"0.{step - 1}", *(version for version, live in load.bound.items() if live)}) >= SLOTS:
                await asyncio.sleep(0.01)  # the coordinator's part: a flip is granted when it leaves room
            calls = load.calls
            flips.append(await replica.flip(f"0.{step}", *trained.stage(f"0.{step}"), needed))
            assert len(held(replica)) <= SLOTS
            while load.calls < calls + CALLERS // 4:
                await asyncio.sleep(0.01)
        load.stop = True
        await asyncio.gather(*callers)
        return load, flips

    restarts = replica.restarts
    load, flips = loop.run(story())
    times = sorted(flip.load_s for flip in flips)
    print(f"{load.calls} calls; median load {times[PUBLISHES // 2] * 1e3:.0f} ms (longest {times[-1] * 1e3:.0f})")
    assert load.failures == []
    assert replica.restarts == restarts
    assert len(load.records) >= CALLERS
    for version, record in load.records:
        assert {span.version for span in record.version_spans} == {version}
    assert len({version for version, _ in load.records}) > PUBLISHES // 2  # some go before an attempt begins
    chosen = [record for _, record in load.records]
    check_spans(trained.merged, chosen[:: max(1, len(chosen) // 24)])
