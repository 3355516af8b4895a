"""A cgroup per sandbox, where one may be made: tools/test-cgroups runs this on a kernel of its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from hpcrl.errors import PolicyError
from hpcrl.sandbox import watch
from hpcrl.sandbox.base import Sandbox, SandboxSpec
from hpcrl.sandbox.cgroup import available
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.pool import Backend, SandboxPool

pytestmark = pytest.mark.skipif(available() is None, reason="no delegated cgroup (v2) with memory and pids here")

IMAGE = os.environ.get("HPCRL_TEST_IMAGE")
"""An unpacked image; without it the process backend stands for both."""


@pytest.fixture
def scratch() -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(prefix="hpcrl-test-"))
    os.chmod(base, 0o711)
    yield base / "scratch"
    assert os.listdir(base / "scratch") == []
    assert sandboxes() == []
    shutil.rmtree(base)


def sandboxes() -> list[Path]:
    parent = available()
    assert parent is not None
    return list(parent.glob("hpcrl-*"))


def inside(scratch: Path, limits: Limits, body: Callable[[Sandbox], Awaitable[None]]) -> None:
    """``body`` in a sandbox with a neighbour beside it that must live."""
    backend: Backend = "apptainer" if IMAGE else "process"
    spec = SandboxSpec(image=Path(IMAGE) if IMAGE else None, limits=limits)

    async def main() -> None:
        async with (
            SandboxPool(backend=backend, start_concurrency=2, scratch=scratch) as pool,
            pool.sandbox(spec) as neighbour,
        ):
            async with pool.sandbox(spec) as sandbox:
                assert len(sandboxes()) == 2
                await body(sandbox)
            assert (await neighbour.run("echo lived")).output == "lived\n"

    asyncio.run(main())


def hog(mib: int) -> str:
    return f"python3 -c 'import time; x = bytearray({mib} << 20); time.sleep(20)'"


@pytest.mark.parametrize(
    "command", [f"{hog(90)} & {hog(90)} & {hog(90)} & wait", f"head -c 66000000 /dev/zero > /tmp/a; {hog(105)}"]
)
def test_memory_of_all_is_bounded_at_once(scratch: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """At once, so with the watch asleep. It would count no files in memory, as the second makes them."""
    monkeypatch.setattr(watch, "_TICK_S", 1000.0)
    if IMAGE is None and "/tmp" in command:
        pytest.skip("the process backend has no /tmp of its own")

    async def body(sandbox: Sandbox) -> None:
        with pytest.raises(PolicyError) as caught:
            await sandbox.run(command, 30)
        assert str(caught.value).startswith("memory_limit: the sandbox used more than")

    inside(scratch, Limits(memory_bytes=128 << 20), body)


def test_within_the_limits(scratch: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.run("python3 -c 'x = bytearray(60 << 20); print(len(x) >> 20)'", 30)).output == "60\n"

    inside(scratch, Limits(memory_bytes=128 << 20), body)


FORKS = """python3 -c '
import os, time
made = 0
try:
    while made < 300:
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except OSError:
    pass
print(made)
'"""


def test_processes_are_bounded_at_once(scratch: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        for path in sandboxes():
            # Below what ulimit allows, so that only the cgroup can be what holds.
            assert (path / "pids.max").read_text() == "248\n"
            (path / "pids.max").write_text("60")
        made = int((await sandbox.run(FORKS, 20)).output)
        assert 20 < made < 60
        assert max(int((path / "pids.current").read_text()) for path in sandboxes()) <= 60

    inside(scratch, Limits(processes=200), body)


def test_a_killed_worker_leaves_no_cgroup(scratch: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from hpcrl.sandbox.base import SandboxSpec\n"
        "from hpcrl.sandbox.pool import SandboxPool\n"
        "async def main():\n"
        "    image = Path(sys.argv[2]) if len(sys.argv) > 2 else None\n"
        "    backend = 'apptainer' if image else 'process'\n"
        "    async with SandboxPool(backend=backend, start_concurrency=1, scratch=Path(sys.argv[1])) as pool:\n"
        "        async with pool.sandbox(SandboxSpec(image=image)) as box:\n"
        "            await box.run('setsid sleep 98765 >/dev/null 2>&1 &')\n"
        "            print('ready', flush=True)\n"
        "            await box.run('sleep 98765', 900)\n"
        "asyncio.run(main())\n"
    )
    arguments = [sys.executable, "-c", code, str(scratch), *([IMAGE] if IMAGE else [])]
    worker = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    assert len(sandboxes()) == 1
    worker.kill()
    worker.wait()

    async def successor() -> None:
        # The guard may still be at it: then it does what this sweep finds done.
        async with SandboxPool(backend="process", start_concurrency=1, scratch=scratch):
            for _ in range(200):
                if not sandboxes():
                    break
                await asyncio.sleep(0.1)

    asyncio.run(successor())
    assert sandboxes() == []
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert b"sleep\x0098765\x00" not in running
