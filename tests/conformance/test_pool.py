"""Sandboxes started ahead, the same tests for every backend: for the next attempt, of one only, replaced, bounded, gone."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpcrl.errors import UserError
from hpcrl.sandbox.base import Mount, Sandbox, SandboxSpec
from hpcrl.sandbox.images import resolve
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.pool import Backend, SandboxPool
from hpcrl.sandbox.shell import ShellSandbox

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0


@dataclass
class World:
    backend: Backend
    image: Path | None
    base: Path

    def spec(self, **fields: object) -> SandboxSpec:
        return SandboxSpec(**{"image": self.image, "files": (self.base / "files",), **fields})  # type: ignore[arg-type]

    def run(self, body: Callable[[SandboxPool], Awaitable[None]], warm: int = 2) -> None:
        async def main() -> None:
            async with SandboxPool(
                backend=self.backend, start_concurrency=2, warm=warm, scratch=self.base / "scratch"
            ) as pool:
                await body(pool)

        asyncio.run(main())


@pytest.fixture(params=["process", pytest.param("apptainer", marks=pytest.mark.apptainer)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    # Run by root, sandboxes are user nobody, who cannot pass through pytest's own private directories.
    base = Path(tempfile.mkdtemp(prefix="hpcrl-test-"))
    os.chmod(base, 0o711)
    (base / "files").mkdir()
    (base / "files" / "a.txt").write_text("alpha\n")
    image = resolve(str(ROOT / "containers/sandbox.def")).path if request.param == "apptainer" else None
    yield World(request.param, image, base)
    left = os.listdir(base / "scratch")
    shutil.rmtree(base)
    assert left == []


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def members(pool: SandboxPool) -> list[ShellSandbox]:
    return [task.result() for shelf in pool._shelves.values() for task in shelf.members if task.done()]


async def one(pool: SandboxPool, spec: SandboxSpec, command: str) -> str:
    async with pool.sandbox(spec) as sandbox:
        return (await sandbox.run(command)).output


def test_the_second_attempt_finds_one_ready(world: World) -> None:
    async def body(pool: SandboxPool) -> None:
        assert await one(pool, world.spec(), "cat a.txt; echo mine > b.txt") == "alpha\n"
        assert (pool.taken, pool.missed) == (0, 1)
        await until(lambda: pool.ready() >= 1)
        assert await one(pool, world.spec(), "ls") == "a.txt\n"
        assert (pool.taken, pool.missed) == (1, 1)

    world.run(body)


def test_the_attempt_brings_files_environment_limits_and_mounts(world: World) -> None:
    tests = world.base / "tests"
    tests.mkdir()
    (tests / "check").write_text("hidden\n")

    def mounted(source: Path | None) -> tuple[Mount, ...]:
        return (Mount(target="/tests", source=source), Mount(target="/logs", writable=True))

    where = ("/tests", "/logs") if world.backend == "apptainer" else ("$HPCRL_MOUNT_0", "$HPCRL_MOUNT_1")

    async def body(pool: SandboxPool) -> None:
        await one(pool, world.spec(mounts=mounted(None)), "true")
        await until(lambda: pool.ready() >= 1)
        spec = world.spec(
            mounts=mounted(tests), env={"GREETING": "it's $me"}, limits=Limits(output_bytes=100, open_files=77)
        )
        async with pool.sandbox(spec) as sandbox:
            assert pool.taken == 1
            assert (await sandbox.run('echo "$GREETING"; ulimit -n')).output == "it's $me\n77\n"
            assert (await sandbox.run(f"cat {where[0]}/check; echo 1 > {where[1]}/reward.txt")).output == "hidden\n"
            assert await sandbox.read_mount("/logs", "reward.txt") == b"1\n"
            assert (await sandbox.run("seq 1000")).truncated
            assert not await sandbox.detached()
            await sandbox.run("echo beta > b.txt")
            artifact = await sandbox.artifact()
            assert b"beta\n" in artifact and b"alpha" not in artifact
        await until(lambda: pool.ready() >= 1)
        async with pool.sandbox(world.spec(mounts=mounted(tests), artifact=artifact)) as sandbox:
            assert pool.taken == 2
            assert (await sandbox.run("cat a.txt b.txt")).output == "alpha\nbeta\n"

    world.run(body)


def test_one_that_died_is_replaced(world: World) -> None:
    async def body(pool: SandboxPool) -> None:
        await one(pool, world.spec(), "true")
        await until(lambda: pool.ready() == 1)
        (dead,) = members(pool)
        os.kill(dead._channel.pid, signal.SIGKILL)
        await until(lambda: dead not in members(pool) and pool.ready() == 1)
        assert await one(pool, world.spec(), "echo on") == "on\n"
        assert pool.taken == 1
        # Hardly noticed by the keeper yet: the attempt gets another one.
        await until(lambda: pool.ready() == 1)
        (dead,) = members(pool)
        os.kill(dead._channel.pid, signal.SIGKILL)
        await until(lambda: not dead.alive)
        assert await one(pool, world.spec(), "echo on") == "on\n"

    world.run(body, warm=1)


def test_a_batch_finds_as_many_as_the_bound_allows(world: World) -> None:
    async def body(pool: SandboxPool) -> None:
        async def batch() -> None:
            assert await asyncio.gather(*(one(pool, world.spec(), f"echo {i}") for i in range(5))) == [
                f"{i}\n" for i in range(5)
            ]

        await batch()
        await until(lambda: pool.ready() == 3)
        before = pool.started
        await batch()
        assert pool.taken >= 3
        await until(lambda: pool.ready() == 3)
        assert pool.started - before == 5  # each is of one attempt only

    world.run(body, warm=3)


def test_kinds_share_the_bound_and_the_latest_goes_first(world: World) -> None:
    async def body(pool: SandboxPool) -> None:
        first, second = world.spec(), world.spec(mounts=(Mount(target="/logs", writable=True),))
        await one(pool, first, "true")
        await until(lambda: pool.ready() == 1)
        await one(pool, second, "true")
        await until(lambda: [sandbox.spec.mounts for sandbox in members(pool)] == [second.mounts])
        assert await one(pool, first, "cat a.txt") == "alpha\n"
        assert pool.taken == 0

    world.run(body, warm=1)


def test_a_cancelled_attempt_and_the_end_leave_nothing(world: World) -> None:
    async def body(pool: SandboxPool) -> None:
        await one(pool, world.spec(), "true")
        await until(lambda: any(shelf.members for shelf in pool._shelves.values()))
        attempts = [asyncio.create_task(one(pool, world.spec(), "sleep 60")) for _ in range(4)]
        await asyncio.sleep(0.02)
        for attempt in attempts:
            attempt.cancel()
        assert all(
            isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*attempts, return_exceptions=True)
        )
        await until(lambda: pool.ready() > 0 and pool._live == set(members(pool)))

    world.run(body)


def test_what_an_attempt_gets_wrong_is_its_own_error(world: World) -> None:
    async def body(pool: SandboxPool) -> None:
        await one(pool, world.spec(), "true")
        await until(lambda: pool.ready() >= 1)
        with pytest.raises(UserError, match="no-name"):
            await one(pool, world.spec(env={"no-name": "x"}), "true")
        assert await one(pool, world.spec(), "echo on") == "on\n"
        await until(lambda: pool.ready() > 0 and pool._live == set(members(pool)))

    world.run(body)


def test_bad_sizes() -> None:
    with pytest.raises(UserError, match="warm is -1"):
        SandboxPool(backend="process", start_concurrency=1, warm=-1)


def test_no_warm_sandboxes_when_none_are_asked_for(world: World) -> None:
    async def body(pool: SandboxPool) -> None:
        async def twice(sandbox: Sandbox) -> None:
            assert (await sandbox.run("echo on")).output == "on\n"

        for _ in range(2):
            async with pool.sandbox(world.spec()) as sandbox:
                await twice(sandbox)
        assert (pool.ready(), pool.taken, pool.started) == (0, 0, 2)

    world.run(body, warm=0)
