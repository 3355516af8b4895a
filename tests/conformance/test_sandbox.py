"""What every sandbox backend promises (hpcrl.sandbox.base), the same tests for all of them."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpcrl.errors import DataError, InfraError, PolicyError, UserError
from hpcrl.sandbox.base import Mount, Sandbox, SandboxSpec
from hpcrl.sandbox.images import resolve
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.pool import Backend, SandboxPool

ROOT = Path(__file__).parents[2]

Body = Callable[[Sandbox], Awaitable[None]]


@dataclass
class World:
    """Runs a test body in a sandbox of one backend."""

    backend: Backend
    image: Path | None
    scratch: Path
    files: Path

    def spec(self, **fields: object) -> SandboxSpec:
        base: dict[str, object] = {"image": self.image, "files": (self.files,), "limits": Limits(command_timeout_s=20)}
        return SandboxSpec(**{**base, **fields})  # type: ignore[arg-type]

    def run(self, body: Body, **fields: object) -> None:
        async def main() -> None:
            async with (
                SandboxPool(backend=self.backend, start_concurrency=2, scratch=self.scratch) as pool,
                pool.sandbox(self.spec(**fields)) as sandbox,
            ):
                await body(sandbox)

        asyncio.run(main())


@pytest.fixture(params=["process", pytest.param("apptainer", marks=pytest.mark.apptainer)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    # Run by root, sandboxes are user nobody, who cannot pass through pytest's own private directories.
    base = Path(tempfile.mkdtemp(prefix="hpcrl-test-"))
    os.chmod(base, 0o711)
    files = base / "files"
    files.mkdir()
    (files / "a.txt").write_text("alpha\n")
    (files / "sub").mkdir()
    (files / "sub" / "b.txt").write_text("beta\n")
    image = resolve(str(ROOT / "containers/sandbox.def")).path if request.param == "apptainer" else None
    yield World(request.param, image, base / "scratch", files)
    left = os.listdir(base / "scratch")
    shutil.rmtree(base)
    assert left == []


def test_commands(world: World) -> None:
    async def body(sandbox: Sandbox) -> None:
        result = await sandbox.run("cat a.txt; echo err >&2; exit 3")
        assert (result.exit_code, result.output) == (3, "alpha\nerr\n")
        assert not result.timed_out and not result.truncated and result.duration_s > 0
        assert (await sandbox.run("x=1; cd sub")).exit_code == 0
        assert (await sandbox.run('echo "[$x]"; ls')).output == "[]\na.txt\nsub\n"
        assert (await sandbox.run("printf 'one\ntwo'; cat <<E\n'quoted' \\ \"$HOME\"\nE")).output.startswith(
            "one\ntwo'quoted'"
        )
        assert (await sandbox.run("cat")).output == ""
        assert (await sandbox.run("nonexistent-program")).exit_code == 127
        assert (await sandbox.run("if")).exit_code == 2
        assert (await sandbox.run("kill -TERM $$")).exit_code == 128 + 15

    world.run(body)


def test_environment(world: World) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.run('echo "$GREETING"; echo "$HPCRL_SECRET"')).output == "it's $me\n\n"

    os.environ["HPCRL_SECRET"] = "visible"
    try:
        world.run(body, env={"GREETING": "it's $me"})
    finally:
        del os.environ["HPCRL_SECRET"]


def test_output_is_bounded_and_decoded(world: World) -> None:
    async def body(sandbox: Sandbox) -> None:
        result = await sandbox.run("printf 'start\\377'; head -c 300000 /dev/zero | tr '\\0' x; echo end")
        assert result.truncated and result.exit_code == 0
        assert result.output.startswith("start\N{REPLACEMENT CHARACTER}x") and result.output.endswith("xend\n")
        assert "bytes omitted" in result.output and len(result.output) < 1100

    world.run(body, limits=Limits(output_bytes=1000))


def test_output_flood_is_killed(world: World) -> None:
    async def body(sandbox: Sandbox) -> None:
        result = await sandbox.run("yes", 20)
        assert result.flooded and result.truncated and not result.timed_out and "killed: more than" in result.output
        assert result.duration_s < 15
        assert (await sandbox.run("echo on")).output.endswith("on\n")

    world.run(body, limits=Limits(output_flood_bytes=1 << 20))


def test_a_command_that_cannot_be_passed(world: World) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.run("echo \0")).exit_code == 126
        assert (await sandbox.run("#" * 200_000)).exit_code == 126
        assert (await sandbox.run("echo fine #" + "x" * 90_000)).output == "fine\n"

    world.run(body)


@pytest.mark.parametrize(
    "command", ["sleep 60", "trap '' TERM INT HUP; while :; do sleep 0.01; done", "sleep 60 | sleep 60"]
)
def test_timeout_kills_the_command_alone(world: World, command: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        began = time.monotonic()
        result = await sandbox.run(f"echo begun; {command}", 0.3)
        assert result.timed_out and result.output == "begun\n"
        assert time.monotonic() - began < 2.5
        assert (await sandbox.run("echo on")).output == "on\n"

    world.run(body)


def test_background_holding_the_output_delays_nothing(world: World) -> None:
    async def body(sandbox: Sandbox) -> None:
        began = time.monotonic()
        result = await sandbox.run("setsid sleep 30 & sleep 30 & echo done")
        assert result.output == "done\n" and time.monotonic() - began < 5

    world.run(body)


def test_processes_that_came_loose_are_known(world: World) -> None:
    async def orderly(sandbox: Sandbox) -> None:
        await sandbox.run("ls | cat; true & wait; sh -c 'true; true'; python3 -c 'pass'")
        assert not await sandbox.detached()

    async def running(sandbox: Sandbox) -> None:
        await sandbox.run("sleep 60 >/dev/null 2>&1 &")
        assert await sandbox.detached()

    async def gone(sandbox: Sandbox) -> None:
        await sandbox.run("(sleep 0.1 &); sleep 0.4")
        assert await sandbox.detached()

    world.run(orderly)
    world.run(orderly, guarded=True)
    if world.backend == "apptainer":  # elsewhere an orphan is adopted by a process that is not the sandbox's
        world.run(running)
        world.run(gone)
        world.run(running, guarded=True)
        world.run(gone, guarded=True)


def test_kill_zero_reaches_only_the_command(world: World) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.run("kill -9 0")).exit_code == 137
        assert (await sandbox.run("echo on")).output == "on\n"

    world.run(body)


def test_killing_the_command_server_is_a_policy_failure(world: World) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.run("echo saved > c.txt")
        with pytest.raises((PolicyError, InfraError)) as caught:
            await sandbox.run("kill -9 $PPID; sleep 5")
        if world.backend == "apptainer":
            assert caught.value.kind == "policy" and caught.value.reason == "sandbox_dead"
        with pytest.raises(type(caught.value)):
            await sandbox.run("echo still there")
        assert b"saved\n" in await sandbox.artifact()

    world.run(body)


def test_files(world: World) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert await sandbox.read("a.txt") == b"alpha\n"
        assert await sandbox.read("a.txt", max_bytes=2) == b"al"
        await sandbox.write("new/deep/c.bin", b"\0\xff")
        assert (await sandbox.run("wc -c < new/deep/c.bin; echo more >> new/deep/c.bin; echo $?")).output == "2\n0\n"
        with pytest.raises(FileNotFoundError):
            await sandbox.read("missing")
        for outside in ("/etc/passwd", "../x", "sub/../../x", ""):
            with pytest.raises(ValueError):
                await sandbox.read(outside)

    world.run(body)


def test_links_are_never_followed_out(world: World) -> None:
    secret = world.files.parent / "secret"
    secret.write_text("host secret")

    async def body(sandbox: Sandbox) -> None:
        await sandbox.run(f"ln -s {secret} link; ln -s {secret.parent} dir; mkfifo pipe")
        for path in ("link", "dir/secret", "pipe"):
            with pytest.raises((OSError, ValueError)):
                await sandbox.read(path)
        await sandbox.write("link", b"mine")
        with pytest.raises(OSError):
            await sandbox.write("dir/secret", b"overwritten")
        assert b"host secret" not in await sandbox.artifact()

    world.run(body)
    assert secret.read_text() == "host secret"


def test_artifact_is_deterministic_and_applies(world: World) -> None:
    change = (
        "echo changed > a.txt; rm -r sub; mkdir -p x/y; printf '#!/bin/sh' > x/run; chmod 755 x/run; ln -s run x/link; "
        "ln -s /etc/passwd out; touch -d 2001-01-01 x/run; ln x/run x/hard; mkfifo f"
    )
    packed: list[bytes] = []

    async def make(sandbox: Sandbox) -> None:
        await sandbox.run(change)
        packed.append(await sandbox.artifact())
        with pytest.raises(PolicyError):
            await sandbox.run("true")

    world.run(make)
    world.run(make)
    assert packed[0] == packed[1]

    async def check(sandbox: Sandbox) -> None:
        listing = (
            await sandbox.run("cat a.txt; find . | sort; readlink x/link; test -x x/run && echo executable")
        ).output
        assert listing == "changed\n.\n./a.txt\n./x\n./x/hard\n./x/link\n./x/run\n./x/y\nrun\nexecutable\n"
        assert len(await sandbox.artifact()) == len(packed[2])

    async def nothing(sandbox: Sandbox) -> None:
        await sandbox.run("touch a.txt; echo alpha > a.txt; cat sub/b.txt")
        packed.append(await sandbox.artifact())

    world.run(nothing)
    world.run(check, artifact=packed[0])


def test_artifact_limit(world: World) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.run("head -c 200000 /dev/zero > big")
        with pytest.raises(PolicyError) as caught:
            await sandbox.artifact()
        assert caught.value.reason == "artifact_limit"

    world.run(body, limits=Limits(artifact_bytes=100_000))


def test_mounts(world: World) -> None:
    tests = world.files.parent / "tests"
    tests.mkdir()
    (tests / "check").write_text("hidden\n")

    async def body(sandbox: Sandbox) -> None:
        where = ("/tests", "/logs/verifier") if world.backend == "apptainer" else ("$HPCRL_MOUNT_0", "$HPCRL_MOUNT_1")
        assert (await sandbox.run(f"cat {where[0]}/check; echo 1 > {where[1]}/reward.txt")).output == "hidden\n"
        assert await sandbox.read_mount("/logs/verifier", "reward.txt") == b"1\n"
        with pytest.raises(FileNotFoundError):
            await sandbox.read_mount("/logs/verifier", "reward.json")
        if world.backend == "apptainer":
            assert (await sandbox.run("echo x > /tests/check")).exit_code != 0

    world.run(body, mounts=(Mount(target="/tests", source=tests), Mount(target="/logs/verifier", writable=True)))


def test_file_size_limit(world: World) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.run("head -c 9000000 /dev/zero > big")).exit_code != 0
        assert (await sandbox.run("wc -c < big")).output.strip() == str(1 << 20)

    world.run(body, limits=Limits(file_bytes=1 << 20))


def test_disk_limit(world: World) -> None:
    async def body(sandbox: Sandbox) -> None:
        with pytest.raises(PolicyError) as caught:
            await sandbox.run("i=0; while :; do i=$((i+1)); head -c 500000 /dev/zero > f$i; sleep 0.02; done")
        assert caught.value.reason == "disk_limit"

    world.run(body, limits=Limits(disk_bytes=8 << 20))


def test_hostile_trees_are_removed(world: World) -> None:
    deep = "i=0; while [ $i -lt 300 ]; do mkdir d; cd d; i=$((i+1)); done"

    async def body(sandbox: Sandbox) -> None:
        await sandbox.run("mkdir -p m/n; echo x > m/n/o; chmod 000 m/n/o m/n m")
        # Nesting is a limit too, when the watch happens to look.
        with suppress(PolicyError):
            await sandbox.run(deep)

    world.run(body)


def test_a_cancelled_command_ends_the_sandbox(world: World) -> None:
    async def body(sandbox: Sandbox) -> None:
        task = asyncio.create_task(sandbox.run("sleep 60"))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(InfraError):
            await sandbox.run("true")

    world.run(body)


def test_many_starts_leave_nothing(world: World) -> None:
    before = len(os.listdir("/proc/self/fd"))

    async def main() -> None:
        async with SandboxPool(backend=world.backend, start_concurrency=4, scratch=world.scratch) as pool:

            async def one(index: int) -> None:
                async with pool.sandbox(world.spec(), f"attempt {index}") as sandbox:
                    assert (await sandbox.run(f"echo {index}")).output == f"{index}\n"

            await asyncio.gather(*(one(index) for index in range(64 if world.backend == "process" else 16)))
            assert pool.start_failures == 0 and pool.started > 0

    asyncio.run(main())
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_start_is_refused_for_what_cannot_be(world: World) -> None:
    async def never(_: Sandbox) -> None:
        raise AssertionError("started")

    with pytest.raises(UserError, match="not a valid environment variable"):
        world.run(never, env={"A-B": "x"})
    with pytest.raises(InfraError) as caught:
        world.run(never, limits=Limits(start_timeout_s=1e-4))
    assert caught.value.reason == "sandbox_start"
    with pytest.raises(DataError):
        world.run(never, artifact=b"not an archive")


def test_files_come_in_order(world: World) -> None:
    later = world.files.parent / "later"
    later.mkdir()
    (later / "a.txt").write_text("from later\n")

    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.run("cat a.txt sub/b.txt; pwd; test -w . && echo writable")).output.splitlines()[:2] == [
            "from later",
            "beta",
        ]
        assert (await sandbox.read("a.txt")) == b"from later\n"

    world.run(body, files=(world.files, later))


def test_the_default_deadline_is_the_limits(world: World) -> None:
    async def body(sandbox: Sandbox) -> None:
        result = await sandbox.run("sleep 30")
        assert result.timed_out and 0.3 <= result.duration_s < 5

    world.run(body, limits=Limits(command_timeout_s=0.3))


def test_output_of_the_background_comes_with_a_later_command(world: World) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.run("(while [ ! -e go ]; do sleep 0.01; done; echo late; : > said) &")).output == ""
        assert "late\n" in (await sandbox.run(": > go; while [ ! -e said ]; do sleep 0.01; done")).output

    world.run(body)


def test_reading_is_bounded(world: World) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.run("head -c 3000000 /dev/zero > big; mkdir -p d; chmod 000 d")
        assert len(await sandbox.read("big")) == 1 << 20
        assert len(await sandbox.read("big", max_bytes=2_500_000)) == 2_500_000
        with pytest.raises((OSError, ValueError)):
            await sandbox.read("sub")

    world.run(body)


def test_writing_replaces(world: World) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.run("ln a.txt hard; chmod 400 a.txt; mkdir taken")
        await sandbox.write("a.txt", b"new\n")
        assert (await sandbox.run("cat a.txt hard; echo more >> a.txt; cat a.txt")).output == "new\nalpha\nnew\nmore\n"
        with pytest.raises(OSError):
            await sandbox.write("taken", b"x")
        with pytest.raises(ValueError):
            await sandbox.write("/etc/x", b"x")

    world.run(body)


def test_memory_and_open_files_of_a_process(world: World) -> None:
    async def body(sandbox: Sandbox) -> None:
        hog = await sandbox.run("python3 -c 'bytearray(300 << 20)'", 20)
        assert hog.exit_code == 1 and "MemoryError" in hog.output
        assert (await sandbox.run("ulimit -n; ulimit -c")).output == "99\n0\n"

    world.run(body, limits=Limits(memory_bytes=100 << 20, open_files=99))


def test_limits_hold_between_commands(world: World) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.run("head -c 9000000 /dev/zero > big")
        await asyncio.sleep(2.0)
        with pytest.raises(PolicyError) as caught:
            await sandbox.run("true")
        assert caught.value.reason == "disk_limit"
        assert b"big" in await sandbox.artifact()

    world.run(body, limits=Limits(disk_bytes=8 << 20))


@pytest.mark.parametrize("command", [None, "sleep 60"])
def test_it_ends_after_its_time(world: World, command: str | None) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.run("echo kept > kept.txt")
        sandbox.end_after(60.0)
        sandbox.end_after(0.3)
        began = time.monotonic()
        if command is None:
            await asyncio.sleep(0.6)
        with pytest.raises(PolicyError) as caught:
            await sandbox.run(command or "true", 50)
        assert caught.value.reason == "attempt_timeout" and time.monotonic() - began < 5
        assert await sandbox.detached()
        assert b"kept\n" in await sandbox.artifact()

    world.run(body)


def test_finish_leaves_the_files_at_rest(world: World) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.run(
            "(while :; do date +%N > ticking; done) >/dev/null 2>&1 & while [ ! -s ticking ]; do sleep 0.01; done"
        )
        await sandbox.finish()
        await sandbox.finish()
        at_rest = await sandbox.read("ticking")
        await asyncio.sleep(0.1)
        assert await sandbox.read("ticking") == at_rest
        with pytest.raises(PolicyError) as caught:
            await sandbox.run("true")
        assert caught.value.reason == "sandbox_dead"

    world.run(body)


def test_stop_at_any_time(world: World) -> None:
    async def main() -> None:
        async with SandboxPool(backend=world.backend, start_concurrency=1, scratch=world.scratch) as pool:
            await pool.create(world.spec()).stop()  # never started
            sandbox = pool.create(world.spec())
            await sandbox.start()
            task = asyncio.create_task(sandbox.run("sleep 60"))
            await asyncio.sleep(0.1)
            await asyncio.gather(sandbox.stop(), sandbox.stop())
            with pytest.raises((PolicyError, InfraError)):
                await task
            with pytest.raises(PolicyError):
                await sandbox.run("true")
            await sandbox.stop()
            worker = next(path for path in world.scratch.iterdir())
            assert [path.name for path in worker.iterdir() if path.is_dir()] == []

    asyncio.run(main())
