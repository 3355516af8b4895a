"""Sandboxes started ahead, in real containers: what a killed worker leaves of them, images that do not start, scoring on them."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.errors import InfraError
from hpcrl.sandbox.base import SandboxSpec
from hpcrl.sandbox.images import Image, resolve
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.pool import SandboxPool
from hpcrl.sandbox.procs import descendants
from hpcrl.sandbox.tasks import sandbox_spec
from hpcrl.scoring.private import load_private
from hpcrl.scoring.runner import score

pytestmark = pytest.mark.apptainer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def image() -> Image:
    return resolve(str(ROOT / "containers/sandbox.def"))


@pytest.fixture
def scratch() -> Iterator[Path]:
    # Run by root, sandboxes are user nobody, who cannot pass through pytest's own private directories.
    base = Path(tempfile.mkdtemp(prefix="hpcrl-test-"))
    os.chmod(base, 0o711)
    yield base / "scratch"
    shutil.rmtree(base)


async def ready(pool: SandboxPool, number: int) -> None:
    async with asyncio.timeout(60):
        while pool.ready() < number:
            await asyncio.sleep(0.01)


_WORKER = """
import asyncio, sys
from pathlib import Path
from hpcrl.sandbox.base import SandboxSpec
from hpcrl.sandbox.pool import SandboxPool

async def main():
    spec = SandboxSpec(image=Path(sys.argv[1]))
    async with SandboxPool(backend="apptainer", start_concurrency=2, warm=2, scratch=Path(sys.argv[2])) as pool:
        async def hold():
            async with pool.sandbox(spec):
                await asyncio.sleep(900)

        holding = [asyncio.create_task(hold()) for _ in range(2)]  # at once, so that two are wanted
        while pool.ready() < 2 or pool.started < 4:
            await asyncio.sleep(0.01)
        print(*(s._channel.pid for s in pool._live), flush=True)
        await asyncio.gather(*holding)

asyncio.run(main())
"""


def test_a_killed_worker_leaves_none_of_them(image: Image, scratch: Path) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(image.path), str(scratch)], stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    runtimes = [int(pid) for pid in worker.stdout.readline().split()]
    pids = [*runtimes, *(pid for runtime in runtimes for pid in descendants(runtime))]
    assert len(runtimes) == 4 and len(pids) >= 12
    worker.kill()
    worker.wait()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (any(map(_alive, pids)) or os.listdir(scratch)):
        time.sleep(0.05)
    assert [pid for pid in pids if _alive(pid)] == [] and os.listdir(scratch) == []


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_an_image_that_does_not_start_fails_the_attempts_one_by_one(image: Image, scratch: Path) -> None:
    broken = scratch.parent / "image"
    broken.mkdir()

    async def main() -> None:
        async with SandboxPool(backend="apptainer", start_concurrency=2, warm=4, scratch=scratch) as pool:
            for _ in range(3):
                with pytest.raises(InfraError) as caught:
                    async with pool.sandbox(SandboxSpec(image=broken)):
                        pass
                assert caught.value.reason == "sandbox_start"
            assert pool.ready() == 0
            async with pool.sandbox(SandboxSpec(image=image.path)) as sandbox:  # others are not held up
                assert (await sandbox.run("echo on")).output == "on\n"

    asyncio.run(main())
    assert os.listdir(scratch) == []


def test_one_started_ahead_is_as_isolated_and_bounded(image: Image, scratch: Path) -> None:
    async def main() -> None:
        async with SandboxPool(backend="apptainer", start_concurrency=2, warm=1, scratch=scratch) as pool:
            async with pool.sandbox(SandboxSpec(image=image.path)):
                pass
            await ready(pool, 1)
            limits = Limits(processes=20, memory_bytes=256 << 20)
            async with pool.sandbox(SandboxSpec(image=image.path, limits=limits)) as sandbox:
                assert pool.taken == 1
                told = await sandbox.run(
                    "ls /sys; grep -c . /proc/net/dev; id -u; env | grep -c APPTAINER; ulimit -u; ulimit -d"
                )
                assert told.output.split()[1:] == [str(os.geteuid() or 65534), "0", "20", str(256 << 10)]
                assert "MemoryError" in (await sandbox.run('python3 -c "bytearray(500_000_000)"')).output
                assert not await sandbox.detached()
                await sandbox.run("(sleep 0.1 &); sleep 0.4")
                assert await sandbox.detached()

    asyncio.run(main())


def test_scoring_on_sandboxes_started_ahead(image: Image, scratch: Path) -> None:
    """The tests come only with the artifact that they judge; each artifact has a sandbox of its own."""
    task_dir = ROOT / "tasks/repair/train/repair-train-0000"
    task, limits = load_private(task_dir), Limits()
    solution = (task_dir / "solution" / "solve.sh").read_text()

    async def main() -> None:
        async with SandboxPool(backend="apptainer", start_concurrency=2, warm=4, scratch=scratch) as pool:

            async def rewarded(command: str) -> float:
                async with pool.sandbox(sandbox_spec(task.public, image, limits)) as sandbox:
                    assert (await sandbox.run("ls /tests/* 2>/dev/null")).output == ""
                    await sandbox.run(command)
                    artifact = await sandbox.artifact()
                return (await score(task, artifact, image, limits, pool)).reward

            for expected in (1.0, 0.0, 1.0, 0.0):
                assert await rewarded(solution if expected else "true") == expected
                await ready(pool, 2)  # one of each kind
            assert pool.taken >= 6

    asyncio.run(main())
