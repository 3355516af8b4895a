from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from toy import ToyTokenizer

from hpcrl.config.schema import RunConfig
from hpcrl.config.sections import ModelSection, TasksSection, WeightsSection
from hpcrl.errors import InfraError
from hpcrl.inference.replica import Replica
from hpcrl.inference.supervisor import Flipped, Generated
from hpcrl.protocol.keys import AttemptKey
from hpcrl.protocol.messages import Sampling

CONFIG = RunConfig(model=ModelSection(path="m"), tasks=TasksSection(train="t"))


class FakeServer:
    """An engine whose flips end as told, and that dies when told."""

    def __init__(self, version: str | None) -> None:
        self.served_version = version
        self.serving = False
        self.checks: list[tuple[str, bool]] = []
        self.check_error: InfraError | None = None
        self.flips: list[str] = []
        self.outcomes: list[str] = []
        self.start_error: InfraError | None = None
        self.started = False
        self.asked = 0
        self.gates: list[bool] = []
        self.gate_when_flipped: Callable[[], bool] | None = None
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> float:
        if self.start_error is not None:
            raise self.start_error
        self.serving = self.served_version is not None
        self.started = True
        return 1.0

    async def generate(self, token_ids: list[int], sampling: Sampling, stop_token_ids: list[int]) -> Generated:
        self.asked += 1
        return Generated([], [], "stop", [])

    async def check(self, manifest: Path, staging: Path) -> None:
        self.checks.append((manifest.name, self.serving))
        if self.check_error is not None:
            raise self.check_error

    async def flip(self, manifest: Path, staging: Path) -> Flipped:
        self.flips.append(manifest.name)
        if self.gate_when_flipped is not None:
            self.gates.append(self.gate_when_flipped())
        outcome = self.outcomes.pop(0) if self.outcomes else "ok"
        if outcome == "ok":
            self.serving = True
            self.served_version = manifest.name
            return Flipped(manifest.name, 0.1, 0.05)
        self.serving = outcome == "flip_refused"
        raise InfraError(outcome, "as told")

    async def wait_dead(self) -> str:
        return await asyncio.shield(self.death)

    async def stop(self) -> None:
        self.serving = False
        if not self.death.done():
            self.death.set_result("stopped")


class Bench:
    def __init__(self, initial: str | None, slots: int) -> None:
        self.servers: list[FakeServer] = []
        self.restarted: list[str | None] = []
        self.downs: list[tuple[bool, int]] = []
        self.broken: list[tuple[str, str, list[str]]] = []
        self.report_error: InfraError | None = None
        self.fail_starts = False
        self.replica = Replica(
            CONFIG.model_copy(update={"weights": WeightsSection(slots=slots)}),
            secret="s",
            replica_id="r0",
            model=Path("m"),
            initial_version=initial,
            log_dir=Path("logs"),
            on_down=self._note_down,
            on_restart=self._note,
            on_broken=self._note_broken,
            tokenizer=ToyTokenizer(),
            new_server=self._server,  # type: ignore[arg-type]
        )

    def _server(self, slot: int, version: str | None) -> Any:
        self.servers.append(FakeServer(version))
        if self.fail_starts:
            self.servers[-1].start_error = InfraError("engine_start", "as told")
        return self.servers[-1]

    async def _note_down(self) -> None:
        self.downs.append((self.gate(), len(self.servers)))
        if self.report_error is not None:
            raise self.report_error

    async def _note_broken(self, version: str, reason: str) -> None:
        self.broken.append((version, reason, list(self.servers[0].flips)))

    async def _note(self, version: str | None) -> None:
        self.restarted.append(version)

    async def flip(self, version: str) -> Flipped:
        return await self.replica.flip(version, Path(version), Path("staging"))

    def gate(self) -> bool:
        return self.replica._gate.is_set()


def bench(scenario: Callable[[Bench], Awaitable[None]], initial: str | None = "0.0", slots: int = 1) -> None:
    async def run() -> None:
        b = Bench(initial, slots)
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


def test_a_flip_changes_the_version() -> None:
    async def scenario(b: Bench) -> None:
        assert b.replica.served_version == "0.0"
        assert b.gate()
        await b.flip("0.1")
        assert b.replica.served_version == "0.1"
        assert b.gate()

    bench(scenario)


def test_start_weights_without_a_name_are_not_served() -> None:
    async def scenario(b: Bench) -> None:
        assert b.replica.served_version is None
        assert not b.gate()
        await b.flip("1.4")
        assert b.replica.served_version == "1.4"
        assert b.gate()

    bench(scenario, initial=None)


def test_a_refused_flip_changes_nothing() -> None:
    async def scenario(b: Bench) -> None:
        b.servers[0].outcomes = ["flip_refused"]
        with pytest.raises(InfraError, match="flip_refused"):
            await b.flip("0.1")
        assert b.replica.served_version == "0.0"
        assert b.gate()
        assert len(b.servers) == 1

    bench(scenario)


def test_staged_bytes_are_checked_before_the_gate_closes() -> None:
    async def scenario(b: Bench) -> None:
        server = b.servers[0]
        server.gate_when_flipped = b.gate
        await b.flip("0.1")
        assert server.checks == [("0.1", True)]  # it went on serving meanwhile
        assert server.gates == [False]
        server.check_error = InfraError("flip_refused", "as told")
        with pytest.raises(InfraError, match="flip_refused"):
            await b.flip("0.2")
        assert server.flips == ["0.1"]
        assert b.gate()
        assert b.replica.served_version == "0.1"

    bench(scenario)


def test_a_failed_flip_loads_the_last_version_again() -> None:
    async def scenario(b: Bench) -> None:
        await b.flip("0.1")
        b.servers[0].outcomes = ["flip_failed"]
        with pytest.raises(InfraError, match="flip_failed"):
            await b.flip("0.2")
        assert b.servers[0].flips == ["0.1", "0.2", "0.1"]
        assert [name for name, _ in b.servers[0].checks] == ["0.1", "0.2", "0.1"]
        assert b.broken == [
            ("0.2", "flip_failed: as told", ["0.1", "0.2"])
        ]  # told before the old version was loaded again
        assert b.replica.served_version == "0.1"
        assert b.gate()
        assert b.replica.restarts == 0

    bench(scenario)


def test_a_failed_flip_from_the_start_weights_takes_a_new_engine() -> None:
    async def scenario(b: Bench) -> None:
        b.servers[0].outcomes = ["flip_failed"]
        with pytest.raises(InfraError, match="flip_failed"):
            await b.flip("0.1")
        assert [server.served_version for server in b.servers] == ["0.0", "0.0"]
        assert b.gate()
        await asyncio.sleep(0)
        await b.flip("0.2")
        assert b.servers[1].flips == ["0.2"]

    bench(scenario)


def test_a_dead_engine_is_replaced_and_loaded_before_it_serves() -> None:
    async def scenario(b: Bench) -> None:
        await b.flip("0.1")
        b.servers[0].serving = False
        b.servers[0].death.set_result("killed")
        await until(lambda: b.restarted == ["0.1"])
        assert b.downs == [(False, 1)]  # told with the gate closed, before there was a new engine
        assert b.servers[1].flips == ["0.1"]
        assert [name for name, _ in b.servers[1].checks] == ["0.1"]
        assert b.replica.served_version == "0.1"
        assert b.replica.serving
        assert b.gate()
        b.servers[1].death.set_result("killed again")
        await until(lambda: b.restarted == ["0.1", "0.1"])

    bench(scenario)


def test_restarts_are_bounded() -> None:
    async def scenario(b: Bench) -> None:
        for _ in range(6):
            before = len(b.restarted)
            b.servers[-1].serving = False
            b.servers[-1].death.set_result("killed")
            await until(lambda before=before: len(b.restarted) > before or b.replica.failed.done())  # type: ignore[misc]
        with pytest.raises(InfraError, match=r"engine_dead.*killed"):
            await b.replica.failed
        assert not b.gate()

    bench(scenario)


def test_an_engine_that_does_not_come_up_again_fails_the_replica() -> None:
    async def scenario(b: Bench) -> None:
        b.fail_starts = True
        b.servers[0].death.set_result("killed")
        with pytest.raises(InfraError, match="engine_start"):
            await asyncio.wait_for(b.replica.failed, 5)
        assert not b.gate()

    bench(scenario)


def test_a_failed_flip_without_a_new_engine_fails_the_replica() -> None:
    async def scenario(b: Bench) -> None:
        b.servers[0].outcomes = ["flip_failed"]
        b.fail_starts = True
        with pytest.raises(InfraError, match="engine_start"):
            await b.flip("0.1")
        with pytest.raises(InfraError, match="engine_start"):
            await asyncio.wait_for(b.replica.failed, 5)
        assert not b.gate()

    bench(scenario)


def test_a_death_that_cannot_be_reported_fails_the_replica() -> None:
    async def scenario(b: Bench) -> None:
        b.report_error = InfraError("coordinator_gone", "as told")
        b.servers[0].death.set_result("killed")
        with pytest.raises(InfraError, match="coordinator_gone"):
            await asyncio.wait_for(b.replica.failed, 5)
        assert not b.gate()
        assert not b.replica.serving

    bench(scenario)


# ---------------------------------------------------------------- two slots


def bound(version: str) -> AttemptKey:
    return AttemptKey("a", version, "r0")


def test_with_two_slots_the_old_version_goes_on_beside_the_new_one() -> None:
    async def scenario(b: Bench) -> None:
        first, second = b.servers
        second.gate_when_flipped = b.gate
        assert (await b.flip("0.1")).pause_s == 0.0
        assert second.flips == ["0.1"]
        assert second.gates == [True]
        assert [b.replica.version_for(bound(version)) for version in ("0.0", "0.1", "0.2")] == ["0.0", "0.1", None]
        assert b.replica.served_version == "0.1"
        await b.flip("0.2")
        assert first.flips == ["0.2"]
        assert [b.replica.version_for(bound(version)) for version in ("0.0", "0.1", "0.2")] == [None, "0.1", "0.2"]
        await b.replica.generate("0.1", [1], Sampling(), [])
        assert (first.asked, second.asked) == (0, 1)

    bench(scenario, slots=2)


def test_with_two_slots_a_failed_flip_costs_only_the_standby_engine() -> None:
    async def scenario(b: Bench) -> None:
        b.servers[1].outcomes = ["flip_failed"]
        with pytest.raises(InfraError, match="flip_failed"):
            await b.flip("0.1")
        assert b.replica.served_version == "0.0"
        assert b.gate()
        assert b.broken == []
        assert len(b.servers) == 3
        await b.flip("0.2")
        assert b.servers[2].flips == ["0.2"]
        assert b.servers[0].flips == []

    bench(scenario, slots=2)


def test_with_two_slots_the_death_of_the_standby_closes_nothing() -> None:
    async def scenario(b: Bench) -> None:
        await b.flip("0.1")
        b.servers[0].serving = False
        b.servers[0].death.set_result("killed")
        await until(lambda: len(b.servers) == 3 and b.servers[2].started)
        assert b.downs == [(True, 2)]
        assert b.restarted == ["0.1"]
        assert b.servers[2].flips == []
        assert b.replica.version_for(bound("0.0")) is None
        b.servers[1].serving = False
        b.servers[1].death.set_result("killed")
        await until(lambda: b.restarted == ["0.1", "0.1"])
        assert b.servers[3].flips == ["0.1"]
        assert b.gate()

    bench(scenario, slots=2)
