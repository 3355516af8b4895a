"""What is served after flips, during flips and under load: real vLLM, real staged weights, checked against forward passes."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from replicas import SECRET, Client, Loop, forward_logprobs, save_model, stage

from hpcrl.config.schema import RunConfig
from hpcrl.config.sections import InferenceSection, ModelSection, RolloutSection, TasksSection, WeightsSection
from hpcrl.errors import InfraError
from hpcrl.inference.replica import Replica
from hpcrl.inference.supervisor import Flipped
from hpcrl.protocol.keys import Pin
from hpcrl.protocol.messages import Sampling
from hpcrl.protocol.record import AttemptRecord
from hpcrl.protocol.version import PolicyVersion
from hpcrl.weights.manifest import Manifest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

Samples = list[tuple[list[int], list[float]]]

CALLERS = 32
PUBLISHES = 50
STEP_S = 120.0
"""Longest flip, call or wait for the next calls: what takes longer hangs."""


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [save_model(tmp_path_factory.mktemp(f"model{seed}"), seed) for seed in range(4)]


async def made(model: Path, version: str, folder: Path, **weights: Any) -> Replica:
    config = RunConfig(
        model=ModelSection(path=str(model)),
        tasks=TasksSection(train="unused"),
        rollout=RolloutSection(context_tokens=512, max_tokens=160),
        inference=InferenceSection(
            enforce_eager=True, kv_cache_gib=0.25, start_timeout_s=400, request_timeout_s=STEP_S
        ),
        weights=WeightsSection(**weights),
    )
    return Replica(config, secret=SECRET, replica_id="r0", model=model, initial_version=version, log_dir=folder)


# ---------------------------------------------------------------- equal to a fresh engine


async def sample(replica: Replica, version: str) -> Samples:
    """20 prompts that share their beginning, so that the prefix cache has something to reuse."""
    found = []
    for number in range(20):
        prompt = [256, *b"user\nthe same long beginning of every prompt, then ", *b"%d" % number, 257, 256]
        generated = await replica.generate(version, prompt, Sampling(max_tokens=24), [257], seed=number)
        assert {span.version for span in generated.spans} == {version}
        found.append((generated.token_ids, generated.logprobs))
    return found


async def started(replica: Replica) -> Samples:
    """What the engine answers with the weights it was started from."""
    await replica.start()
    return await sample(replica, str(replica.served_version))


async def flipped_samples(replica: Replica, model: Path, version: str, folder: Path) -> Samples:
    before = await sample(replica, str(replica.served_version))
    flipped = await replica.flip(version, *stage(model, version, folder))
    print(f"pause {flipped.pause_s * 1e3:.0f} ms, of which loading and comparing {flipped.load_s * 1e3:.0f} ms")
    after = await sample(replica, version)
    assert after != before
    return after


def check_equal(found: Samples, expected: Samples) -> None:
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    rows = zip(found, expected, strict=True)
    gap = max(abs(a - b) for (_, one), (_, other) in rows for a, b in zip(one, other, strict=True))
    print(f"largest difference of a logprob: {gap:.1e}")
    assert gap <= 1e-5


@pytest.fixture(scope="module")
def token_replica(loop: Loop, models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """Started from model 0 as 0.0."""
    replica = loop.run(made(models[0], "0.0", tmp_path_factory.mktemp("token"), pin="token"))
    loop.run(replica.start())
    yield replica
    loop.run(replica.stop())


@pytest.fixture(scope="module")
def turn_replica(
    loop: Loop, models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Replica, Samples]]:
    """Started from model 1 as 0.1; and what it answered before any flip."""
    replica = loop.run(made(models[1], "0.1", tmp_path_factory.mktemp("turn"), pin="turn"))
    yield replica, loop.run(started(replica))
    loop.run(replica.stop())


def test_a_flipped_engine_answers_as_a_fresh_one(
    loop: Loop, models: list[Path], tmp_path: Path, token_replica: Replica, turn_replica: tuple[Replica, Samples]
) -> None:
    check_equal(loop.run(flipped_samples(token_replica, models[1], "0.1", tmp_path)), turn_replica[1])


def test_a_flipped_engine_of_an_untied_model_answers_as_a_fresh_one(loop: Loop, tmp_path: Path) -> None:
    old, new = (save_model(tmp_path / f"{seed}", seed, tied=False) for seed in (0, 1))

    async def answers(model: Path, target: Path | None) -> Samples:
        replica = await made(model, "0.0", model)
        try:
            fresh = await started(replica)
            return fresh if target is None else await flipped_samples(replica, target, "0.1", tmp_path)
        finally:
            await replica.stop()

    async def both() -> tuple[Samples, Samples]:
        return await asyncio.gather(answers(new, None), answers(old, new))

    expected, found = loop.run(both())
    check_equal(found, expected)


def test_a_head_that_stays_old_is_caught_and_the_replica_serves_the_old_version_again(
    loop: Loop, models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own fault, brought back by a second plugin that takes our repair away."""
    plugin = tmp_path / "plugin"
    info = plugin / "norepair-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: norepair\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nnorepair = norepair:register\n")
    (plugin / "norepair.py").write_text(
        "def register():\n"
        "    from hpcrl.weights.vllm_transfer import ShmWeightTransferEngine as engine\n"
        "    engine._repair_tied_head = lambda self: None\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(plugin))
    broken: list[tuple[str, str, bool]] = []

    async def story() -> None:
        replica = await made(models[0], "0.0", tmp_path)

        async def note(version: str, reason: str) -> None:
            broken.append((version, reason, replica.serving))

        replica._on_broken = note
        await replica.start()
        try:
            before = await sample(replica, "0.0")
            with pytest.raises(
                InfraError, match=r"held_weights: after loading version 0\.1 the packed copy of lm_head"
            ):
                await replica.flip("0.1", *stage(models[1], "0.1", tmp_path))
            assert (replica.served_version, replica.serving, replica.restarts) == ("0.0", True, 1)
            check_equal(await sample(replica, "0.0"), before)
        finally:
            await replica.stop()

    loop.run(story())
    assert [(version, serving) for version, _, serving in broken] == [("0.1", False)]
    assert "held_weights" in broken[0][1]


def test_a_manifest_that_gives_tensors_each_others_names_is_refused(
    loop: Loop, models: list[Path], tmp_path: Path, token_replica: Replica
) -> None:
    """Every byte is right, and each digest; what would be served is another model."""
    served = str(token_replica.served_version)
    manifest, staging = stage(models[2], "0.2", tmp_path)
    content = json.loads(manifest.read_text())
    one, other = (
        next(t for t in content["tensors"] if t["name"] == f"model.layers.{layer}.mlp.up_proj.weight")
        for layer in (0, 1)
    )
    one["name"], other["name"] = other["name"], one["name"]
    manifest.write_text(json.dumps(content))
    with pytest.raises(
        InfraError, match=rf"flip_refused: 0\.2 was refused, {served} goes on serving: manifest: .*seal"
    ):
        loop.run(token_replica.flip("0.2", manifest, staging))
    assert (token_replica.served_version, token_replica.serving) == (served, True)


# ---------------------------------------------------------------- flips under load


@dataclass
class Load:
    """Callers that talk without pause; ``stop`` lets each end its attempt. ``bound``: live attempts by the version they began with."""

    url: str
    replica: Replica
    pin: Pin
    turns: int
    max_tokens: int
    stop: bool = False
    calls: int = 0
    failures: list[str] = field(default_factory=list)
    records: list[tuple[str, AttemptRecord]] = field(default_factory=list)
    bound: Counter[str] = field(default_factory=Counter)

    async def caller(self, number: int) -> None:
        for attempt in itertools.count():
            if self.stop:
                return
            version = str(self.replica.served_version)
            self.bound[version] += 1
            client = Client(self.url, f"a{number}-{attempt}", version=version, pin=self.pin)
            messages: list[dict[str, Any]] = []
            for turn in range(self.turns):
                messages.append({"role": "user", "content": f"caller {number} turn {turn}"})
                status, body = await asyncio.wait_for(client.chat(messages, max_tokens=self.max_tokens), STEP_S)
                self.calls += 1
                if status != 200:
                    self.failures.append(f"{client.attempt}: {status} {body}")
                    break
                messages.append(body["choices"][0]["message"])
            self.bound[version] -= 1
            self.records.append((version, await client.record()))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(STEP_S):
        while not condition():
            await asyncio.sleep(0.01)


def check_spans(models: list[Path], records: list[AttemptRecord]) -> None:
    """Each sampled token's logprob is that of the weights which its span names (version k has the weights of model k % 4)."""
    for record in records:
        assert record.segments == [0]
        by_model = [forward_logprobs(model, record.token_ids) for model in models]
        covered = 0
        for span in record.version_spans:
            expected = by_model[PolicyVersion.parse(span.version).step % len(models)]
            gaps = [abs(record.logprobs[i] - expected[i]) for i in range(span.start, span.end)]
            assert max(gaps) < 1e-4, (record.attempt_id, span, max(gaps))
            covered += span.end - span.start
        assert covered == sum(record.loss_mask)


def run_load(
    loop: Loop,
    models: list[Path],
    tmp_path: Path,
    replica: Replica,
    pin: Pin,
    *,
    publishes: int,
    turns: int,
    max_tokens: int,
) -> tuple[Load, list[Flipped]]:
    """``publishes`` flips one after the other while 32 callers talk; returns what happened and each flip's times."""
    staged = []
    for number, model in enumerate(models):
        folder = tmp_path / f"staged{number}"
        folder.mkdir()
        staged.append(stage(model, f"0.{number}", folder))

    def staged_as(version: str) -> tuple[Path, Path]:
        """Version k: the weights of model k % 4 under that name, in one of two files by turns, as in the double buffer."""
        step = PolicyVersion.parse(version).step
        manifest, staging = staged[step % len(models)]
        described = Manifest.from_json(manifest.read_text())
        named, slot = tmp_path / f"{version}.json", tmp_path / f"slot{step % 2}.weights"
        named.write_text(replace(described, version=version, step=step).to_json())
        shutil.copyfile(staging, slot)
        return named, slot

    async def story() -> tuple[Load, list[Flipped]]:
        flips = []
        load = Load(await replica.serve("127.0.0.1"), replica, pin, turns, max_tokens)
        callers = [asyncio.create_task(load.caller(number)) for number in range(CALLERS)]
        first = PolicyVersion.parse(str(replica.served_version)).step + 1
        for step in range(first, first + publishes):
            version, current = f"0.{step}", str(replica.served_version)
            # The coordinator's part: the second engine is still needed.
            await until(lambda current=current: pin != "trajectory" or sum(load.bound.values()) == load.bound[current])
            calls = load.calls
            flips.append(await asyncio.wait_for(replica.flip(version, *staged_as(version)), STEP_S))
            await until(lambda calls=calls: load.calls >= calls + CALLERS // 4)
        load.stop = True
        await asyncio.gather(*callers)
        assert replica.restarts == 0
        return load, flips

    return loop.run(story())


def check_load(load: Load, flips: list[Flipped], models: list[Path]) -> None:
    """No call was lost, each span is true; attempts saw versions from the bound one on, in order."""
    pauses, times = sorted(flip.pause_s for flip in flips), sorted(flip.load_s for flip in flips)
    several = [record for _, record in load.records if len({s.version for s in record.version_spans}) > 1]
    print(
        f"{load.pin}: {len(flips)} flips, {load.calls} calls; median pause {pauses[len(flips) // 2] * 1e3:.0f} ms (longest "
        f"{pauses[-1] * 1e3:.0f}), median load {times[len(flips) // 2] * 1e3:.0f} ms; {len(several)} of {len(load.records)} attempts "
        "of several versions"
    )
    assert load.failures == []
    assert len(load.records) >= CALLERS
    for version, record in load.records:
        steps = [PolicyVersion.parse(span.version).step for span in record.version_spans]
        assert steps == sorted(steps)
        assert steps[0] >= PolicyVersion.parse(version).step
        for request in record.requests:
            within = {s.version for s in record.version_spans if s.start < request.end and s.end > request.start}
            assert len(within) == 1 or load.pin == "token"
    chosen = [record for _, record in load.records] if load.pin == "trajectory" else several
    assert len(chosen) >= CALLERS // 2
    check_spans(models, chosen[:: max(1, len(chosen) // 16)])


def test_50_publishes_in_the_middle_of_generations(
    loop: Loop, models: list[Path], tmp_path: Path, token_replica: Replica
) -> None:
    load, flips = run_load(loop, models, tmp_path, token_replica, "token", publishes=PUBLISHES, turns=2, max_tokens=160)
    check_load(load, flips, models)
    served = {span.version for _, record in load.records for span in record.version_spans}
    assert served >= {flip.version for flip in flips[:-1]}


def test_50_publishes_between_calls(
    loop: Loop, models: list[Path], tmp_path: Path, turn_replica: tuple[Replica, Samples]
) -> None:
    replica = turn_replica[0]
    load, flips = run_load(loop, models, tmp_path, replica, "turn", publishes=PUBLISHES, turns=2, max_tokens=32)
    check_load(load, flips, models)


def test_with_two_slots_attempts_end_with_the_version_they_began_with(
    loop: Loop, models: list[Path], tmp_path: Path
) -> None:
    replica = loop.run(made(models[0], "0.0", tmp_path, slots=2))
    try:
        loop.run(replica.start())
        load, flips = run_load(loop, models, tmp_path, replica, "trajectory", publishes=12, turns=3, max_tokens=32)
    finally:
        loop.run(replica.stop())
    check_load(load, flips, models)
    assert {flip.pause_s for flip in flips} == {0.0}
    for version, record in load.records:
        assert {span.version for span in record.version_spans} == {version}
