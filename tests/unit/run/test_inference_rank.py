"""How an inference rank ties its engine to the coordinator; both are stand-ins that note what they hear."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.config.schema import RunConfig
from hpcrl.config.sections import ModelSection, TasksSection
from hpcrl.inference.proxy import Stats
from hpcrl.inference.supervisor import Flipped
from hpcrl.protocol import messages as m
from hpcrl.protocol.keyfiles import issue_keys
from hpcrl.protocol.rundir import RunDir
from hpcrl.run import inference
from hpcrl.weights.receiver import Timings

CONFIG = RunConfig(model=ModelSection(path="m"), tasks=TasksSection(train="t"))


class Engine:
    """Stands in for Replica; ``hooks`` are what the rank handed to it."""

    def __init__(self, config: RunConfig, **hooks: Any) -> None:
        self.hooks = hooks
        self.served_version: str | None = None
        self.serving = False
        self.stats, self.restarts = Stats(), 0

    async def start(self) -> float:
        return 0.0

    async def serve(self, host: str) -> str:
        return f"http://{host}/v1"

    async def flip(self, version: str, manifest: Path, staging: Path, keep: list[str]) -> Flipped:
        assert keep == ["0.0"]
        self.served_version, self.serving = version, True
        return Flipped(version, 0.5, 0.1)

    async def stop(self) -> None:
        self.serving = False


class Coordinator:
    def __init__(self, *_: Any) -> None:
        self.said: list[m.Message] = []

    def call(self, endpoint: Any, request: m.Message) -> Any:
        self.said.append(request)
        return SimpleNamespace(granted=True, keep=["0.0"])


def test_a_rank_reports_its_dead_engine_and_what_still_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    issue_keys(run)
    monkeypatch.setattr(inference, "Replica", Engine)
    monkeypatch.setattr(inference, "Client", Coordinator)
    unused: Any = None
    rank = inference._Rank(run, CONFIG, unused, unused, None, 0)

    async def story() -> None:
        manifest: Any = SimpleNamespace(version="0.0", step=0)
        run.manifests.mkdir(parents=True, exist_ok=True)
        (run.manifests / "0.0.json").write_text("{}")
        await asyncio.to_thread(rank._flip, manifest, tmp_path, Timings(2.0, 1.0, "right"))
        engine: Any = rank._replica
        engine.serving = False
        await engine.hooks["on_down"]()
        engine.serving = True
        await engine.hooks["on_restart"]("0.0")
        await asyncio.to_thread(rank._refused, "0.1", "disk")

    monkeypatch.setattr(rank, "_until_over", story)
    asyncio.run(rank.serve())
    said = [type(message).__name__ for message in rank._client.said]  # type: ignore[attr-defined]
    first, rest = said[:3], said[3:]
    assert first == ["ReplicaRegister", "FlipRequest", "ReplicaReady"]
    assert rest == ["ReplicaRegister", "ReplicaReady", "ReplicaReady", "ReplicaRefused"]
    ready = [message for message in rank._client.said if isinstance(message, m.ReplicaReady)]  # type: ignore[attr-defined]
    assert {(message.version, message.digest) for message in ready} == {("0.0", "right")}
    assert [message.transfer_s for message in ready] == [2.0, 0.0, 0.0]
