"""Adapters beside each other: which are held, which go when, and what happens when one does not load. The engine is a stand-in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from toy import ToyTokenizer

from hpcrl.config.schema import RunConfig
from hpcrl.config.sections import LoraSection, ModelSection, TasksSection, WeightsSection
from hpcrl.errors import InfraError
from hpcrl.inference import adapters as module
from hpcrl.inference.adapters import Adapters
from hpcrl.inference.replica import Replica
from hpcrl.inference.supervisor import Generated
from hpcrl.protocol.keys import AttemptKey, Pin
from hpcrl.protocol.messages import Sampling
from hpcrl.weights.manifest import Layout, Manifest


class FakeServer:
    """Holds adapters by name; ``outcomes`` are the reasons of the next loads and drops ("ok")."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.outcomes: list[str] = []
        self.asked: list[str] = []
        self.answers = asyncio.Event()
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def serving(self) -> bool:
        return bool(self.held) and not self.death.done()

    async def start(self) -> float:
        return 1.0

    async def check(self, manifest: Path, staging: Path) -> None:
        assert (manifest.exists(), staging) == (True, Path("staging"))

    async def load_adapter(self, version: str, manifest: Path, directory: Path) -> float:
        self._as_told()
        assert directory == Path("store") / version
        self.held.append(version)
        return 0.1

    async def drop_adapter(self, version: str) -> None:
        self._as_told()
        self.held.remove(version)

    def _as_told(self) -> None:
        outcome = self.outcomes.pop(0) if self.outcomes else "ok"
        if outcome != "ok":
            raise InfraError(outcome, "as told")

    async def generate(
        self, token_ids: list[int], sampling: Sampling, stop_token_ids: list[int], *, adapter: str
    ) -> Generated:
        self.asked.append(adapter)
        await self.answers.wait()
        return Generated([], [], "stop", [])

    async def wait_dead(self) -> str:
        return await asyncio.shield(self.death)

    async def stop(self) -> None:
        if not self.death.done():
            self.death.set_result("stopped")


class FakeStore:
    def __init__(self) -> None:
        self.versions: list[str] = []

    def write(self, manifest: Manifest, staging: Path) -> Path:
        self.versions.append(manifest.version)
        return Path("store") / manifest.version

    def remove(self, version: str) -> None:
        self.versions.remove(version)


class Bench:
    def __init__(self, folder: Path, slots: int) -> None:
        self.folder = folder
        self.servers: list[FakeServer] = []
        self.store = FakeStore()
        self.told: list[str] = []
        config = RunConfig(
            model=ModelSection(path="m"),
            lora=LoraSection(),
            tasks=TasksSection(train="t"),
            weights=WeightsSection(slots=slots),
        )
        self.replica = Replica(
            config,
            secret="s",
            replica_id="r0",
            model=Path("m"),
            initial_version=None,
            log_dir=Path("logs"),
            on_down=self._note("down"),
            on_restart=lambda version: self._note(f"back with {version}")(),
            adapters=self.store,  # type: ignore[arg-type]
            tokenizer=ToyTokenizer(),
            new_server=self._server,
        )

    def _server(self, slot: int, version: str | None) -> Any:
        self.servers.append(FakeServer())
        return self.servers[-1]

    def _note(self, what: str) -> Callable[[], Awaitable[None]]:
        async def note() -> None:
            self.told.append(what)

        return note

    async def flip(self, version: str, keep: Collection[str] = ()) -> None:
        lineage, step = version.split(".")
        manifest = self.folder / version
        manifest.write_text(
            Manifest(version, None, int(lineage), int(step), whole(), 0, (), (), "t", "c").to_json(),
        )
        await self.replica.flip(version, manifest, Path("staging"), keep)

    @property
    def held(self) -> list[str]:
        engines = self.replica._engines
        assert isinstance(engines, Adapters)
        assert self.servers[-1].held == engines.held
        return engines.held

    def version_for(self, version: str, pin: Pin = "trajectory") -> str | None:
        return self.replica.version_for(AttemptKey("a", version, "r0", pin))


def whole() -> str:
    from hpcrl.weights.digest import whole_digest

    assert Layout.of([]).nbytes == 0
    return whole_digest([])


def bench(folder: Path, scenario: Callable[[Bench], Awaitable[None]], slots: int = 2) -> None:
    async def run() -> None:
        b = Bench(folder, slots)
        await b.replica.start()
        try:
            await scenario(b)
        finally:
            await b.replica.stop()

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


def test_old_and_new_are_served_side_by_side_until_the_old_one_is_not_needed(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        assert not b.replica.serving
        await b.flip("0.0")
        await b.flip("0.1", keep=["0.0"])
        assert b.replica.serving
        assert (b.held, b.replica.served_version) == (["0.0", "0.1"], "0.1")
        assert [b.version_for(version) for version in ("0.0", "0.1", "0.2")] == ["0.0", "0.1", None]
        assert b.version_for("0.0", "turn") == "0.1"
        with pytest.raises(InfraError, match=r"no place for adapter 0\.2: attempts are bound to 0\.0, 0\.1"):
            await b.flip("0.2", keep=["0.1", "0.0"])
        assert b.held == ["0.0", "0.1"]
        await b.flip("0.2", keep=["0.1"])
        assert b.held == b.store.versions == ["0.1", "0.2"]
        assert b.version_for("0.0") is None
        with pytest.raises(InfraError, match=r"adapter 0\.2 is held already"):
            await b.flip("0.2")

    bench(tmp_path, scenario)


def test_the_present_version_stays_even_if_nobody_is_bound_to_it(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        await b.flip("0.0")
        await b.flip("0.1")
        assert b.held == ["0.0", "0.1"]
        await b.flip("0.2")
        assert b.held == ["0.1", "0.2"]

    bench(tmp_path, scenario)


def test_an_adapter_is_not_taken_from_a_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.0)
    monkeypatch.setattr(module, "_ABORT_S", 0.05)

    async def scenario(b: Bench) -> None:
        await b.flip("0.0")
        await b.flip("0.1")
        ends, given_up = (asyncio.create_task(b.replica.generate("0.0", [1], Sampling(), [])) for _ in range(2))
        await until(lambda: b.servers[0].asked == ["0.0", "0.0"])
        flip = asyncio.create_task(b.flip("0.2"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert (b.servers[0].held, b.version_for("0.0")) == (["0.0", "0.1"], None)
        given_up.cancel()
        b.servers[0].answers.set()
        await ends
        for _ in range(20):
            await asyncio.sleep(0)
        assert b.servers[0].held == ["0.0", "0.1"]  # vLLM has not yet noticed that nobody waits for the other answer
        await flip
        assert b.held == ["0.1", "0.2"]

    bench(tmp_path, scenario)


def test_an_adapter_that_is_not_what_was_published_costs_nothing_else(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        await b.flip("0.0")
        b.servers[0].outcomes = ["adapter_refused"]
        with pytest.raises(InfraError, match="adapter_refused"):
            await b.flip("0.1")
        assert (b.held, b.store.versions, b.replica.serving) == (["0.0"], ["0.0"], True)
        await b.flip("0.2")
        assert b.held == ["0.0", "0.2"]
        assert (len(b.servers), b.told) == (1, [])

    bench(tmp_path, scenario)


@pytest.mark.parametrize(("outcomes", "left"), [(["ok", "engine_unreachable"], ["0.1"]), (["adapter_failed"], ["0.1"])])
def test_an_engine_in_doubt_is_replaced_and_gets_the_adapters_that_are_held(
    tmp_path: Path, outcomes: list[str], left: list[str]
) -> None:
    async def scenario(b: Bench) -> None:
        await b.flip("0.0")
        await b.flip("0.1")
        b.servers[0].outcomes = outcomes  # of dropping 0.0, and of loading 0.2
        with pytest.raises(InfraError, match="as told"):
            await b.flip("0.2")
        await until(lambda: len(b.told) == 2)
        assert (b.held, b.store.versions, b.replica.served_version) == (left, left, "0.1")
        assert b.told == ["down", "back with 0.1"]
        await b.flip("0.3")
        assert b.held == ["0.1", "0.3"]

    bench(tmp_path, scenario)


def test_a_dead_engines_successor_gets_all_adapters(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        await b.flip("0.0")
        await b.flip("0.1", keep=["0.0"])
        b.servers[0].death.set_result("killed")
        await until(lambda: len(b.told) == 2)
        assert (len(b.servers), b.held, b.replica.serving) == (2, ["0.0", "0.1"], True)

    bench(tmp_path, scenario)


def test_a_replica_whose_adapters_do_not_come_back_has_failed(tmp_path: Path) -> None:
    async def scenario(b: Bench) -> None:
        await b.flip("0.0")
        new = b._server

        def broken(slot: int, version: str | None) -> Any:
            server = new(slot, version)
            server.outcomes = ["adapter_refused"]
            return server

        b.replica._engines._new_server = broken  # type: ignore[attr-defined]
        b.servers[0].death.set_result("killed")
        with pytest.raises(InfraError, match="adapter_refused"):
            await b.replica.failed

    bench(tmp_path, scenario)
