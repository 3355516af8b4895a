"""What only the real container gives: isolation, limits as a whole, leftovers of a killed worker, the unprivileged user."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from hpcrl.errors import InfraError, PolicyError
from hpcrl.sandbox.base import CommandResult, Sandbox, SandboxSpec
from hpcrl.sandbox.check import preflight
from hpcrl.sandbox.images import Image, resolve
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.pool import SandboxPool
from hpcrl.sandbox.procs import children

pytestmark = pytest.mark.apptainer

ROOT = Path(__file__).parents[2]
SYSTEM_PYTHON = "/usr/bin/python3"


@pytest.fixture(scope="module")
def image() -> Image:
    return resolve(str(ROOT / "containers/sandbox.def"))


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory that user nobody can pass through, unlike pytest's own: run by root, sandboxes are nobody."""
    path = Path(tempfile.mkdtemp(prefix="hpcrl-test-"))
    os.chmod(path, 0o711)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def scratch(base: Path) -> Path:
    return base / "scratch"


def inside(
    scratch: Path, image: Image, body: Callable[[Sandbox], Awaitable[None]], limits: Limits | None = None
) -> None:
    async def main() -> None:
        spec = SandboxSpec(image=image.path, limits=limits or Limits(command_timeout_s=20))
        async with (
            SandboxPool(backend="apptainer", start_concurrency=2, scratch=scratch) as pool,
            pool.sandbox(spec) as sandbox,
        ):
            await body(sandbox)

    asyncio.run(main())


def test_isolation(image: Image, scratch: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        async def answer(command: str) -> CommandResult:
            return await sandbox.run(command)

        assert (await answer("ls /sys")).output == ""
        assert (await answer("cat /proc/net/dev | tail -n +3 | cut -d: -f1")).output.strip() == "lo"
        assert (await answer("id -u")).output.strip() != "0"
        assert (await answer("hostname")).output.strip() == "sandbox"
        assert (await answer("grep CapEff /proc/self/status")).output.split()[1] == "0" * 16
        assert (await answer("grep NoNewPrivs /proc/self/status")).output.split()[1] == "1"
        assert (await answer("echo x > /proc/sys/kernel/core_pattern")).exit_code != 0
        assert int((await answer("ls /proc | grep -c '^[0-9]'")).output) < 10
        assert (await answer("env | grep -E 'APPTAINER|SINGULARITY'")).output == ""
        assert (await answer("test -e /root/.bashrc -a -r /root/.bash_history")).exit_code != 0
        assert (
            await answer("python3 -c 'import socket; socket.create_connection((\"10.0.0.1\", 80), 2)'")
        ).exit_code != 0
        assert (
            await answer("echo x > /tmp/y; df -k /tmp | tail -1 | tr -s ' ' | cut -d' ' -f2")
        ).output.strip() == "65536"

    inside(scratch, image, body)


def test_a_guarded_image_is_read_only(image: Image, scratch: Path) -> None:
    """Whoever owns the image: an ordinary user owns what was unpacked for it, and so do the sandbox's processes."""

    async def main() -> None:
        spec = SandboxSpec(image=image.path, guarded=True)
        async with (
            SandboxPool(backend="apptainer", start_concurrency=1, scratch=scratch) as pool,
            pool.sandbox(spec) as box,
        ):
            for place in ("/etc/ld.so.preload", "/usr/bin/planted", "/usr/local/bin/python3"):
                assert "Read-only file system" in (await box.run(f"echo x > {place}")).output
            assert (await box.run("echo x | tee /tmp/x /var/tmp/x /dev/shm/x ./x")).exit_code == 0

    asyncio.run(main())


def test_fork_bomb_stays_inside(image: Image, scratch: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        began = time.monotonic()
        with pytest.raises(PolicyError):
            await sandbox.run("b() { b | b & }; b; sleep 60", 2)
            # The bomb was ended with its command: nothing of it may slow the next one.
            assert (await sandbox.run("echo on", 10)).output.endswith("on\n")
            raise PolicyError("survived")
        assert time.monotonic() - began < 20

    inside(scratch, image, body, Limits(processes=32))


def test_memory_of_all_processes_is_bounded(image: Image, scratch: Path) -> None:
    hog = 'python3 -c "import time; x = bytearray(60_000_000); time.sleep(30)"'

    async def body(sandbox: Sandbox) -> None:
        alone = await sandbox.run('python3 -c "bytearray(500_000_000)"')
        assert alone.exit_code == 1 and "MemoryError" in alone.output
        with pytest.raises(PolicyError) as caught:
            await sandbox.run(f"{hog} & {hog} & {hog} & {hog} & wait", 15)
        assert caught.value.reason == "memory_limit"

    inside(scratch, image, body, Limits(memory_bytes=160 << 20))


def test_a_runtime_killed_from_outside_is_infra(image: Image, scratch: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        task = asyncio.create_task(sandbox.run("sleep 30"))
        await asyncio.sleep(0.1)
        os.kill(sandbox._channel.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(InfraError) as caught:
            await task
        assert caught.value.reason == "sandbox_killed"

    inside(scratch, image, body)


def test_a_start_that_fails_is_infra(scratch: Path, base: Path) -> None:
    empty = base / "image"
    empty.mkdir()

    async def body(_: Sandbox) -> None:
        raise AssertionError("started")

    with pytest.raises(InfraError) as caught:
        inside(scratch, Image(empty, "sha256-0"), body)
    assert caught.value.reason == "sandbox_start" and len(str(caught.value)) > len("sandbox_start: ")


def test_preflight(image: Image, scratch: Path) -> None:
    asyncio.run(preflight(image))


_WORKER = """
import asyncio, sys
from pathlib import Path
from hpcrl.sandbox.base import SandboxSpec
from hpcrl.sandbox.pool import SandboxPool

async def main():
    async with SandboxPool(backend="apptainer", start_concurrency=2, scratch=Path(sys.argv[2])) as pool:
        async with pool.sandbox(SandboxSpec(image=Path(sys.argv[1]))) as one, pool.sandbox(SandboxSpec(image=Path(sys.argv[1]))) as two:
            await one.run("setsid sleep 987 & chmod 000 .")
            print("ready", one._channel.pid, two._channel.pid, flush=True)
            await two.run("sleep 987", 900)

asyncio.run(main())
"""


def test_a_killed_worker_leaves_nothing(image: Image, scratch: Path) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(image.path), str(scratch)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    assert worker.stdout is not None
    pids = [int(pid) for pid in worker.stdout.readline().split()[1:]]
    inits = [init for pid in pids for init in children(pid)]
    assert len(inits) == 2
    worker.kill()
    worker.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (any(map(_alive, inits)) or os.listdir(scratch)):
        time.sleep(0.05)
    assert not any(map(_alive, inits)) and os.listdir(scratch) == []


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(os.geteuid() != 0, reason="is an ordinary user already")
@pytest.mark.skipif(not os.access(SYSTEM_PYTHON, os.X_OK), reason="needs a Python that ordinary users can read")
def test_as_an_ordinary_user(image: Image, scratch: Path) -> None:
    script = scratch.parent / "user.py"
    script.write_text(
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from hpcrl.sandbox.base import SandboxSpec\n"
        "from hpcrl.sandbox.pool import SandboxPool\n"
        "async def main():\n"
        "    async with SandboxPool(backend='apptainer', start_concurrency=1, scratch=Path(sys.argv[2])) as pool:\n"
        "        async with pool.sandbox(SandboxSpec(image=Path(sys.argv[1]))) as box:\n"
        "            print((await box.run('mkdir m; echo x > m/y; chmod 000 m/y m; id -u')).output.strip())\n"
        "            print(len(await box.artifact()) > 0)\n"
        "asyncio.run(main())\n"
    )
    source = scratch.parent / "src"  # the project itself may lie where only root can pass
    shutil.copytree(ROOT / "src" / "hpcrl" / "sandbox", source / "hpcrl" / "sandbox")
    (source / "hpcrl" / "protocol").mkdir()
    for name in ("__init__.py", "errors.py", "protocol/__init__.py", "protocol/clip.py"):
        shutil.copy(ROOT / "src" / "hpcrl" / name, source / "hpcrl" / name)
    home = scratch.parent / "user"
    home.mkdir()
    os.chown(home, 1, 1)
    os.chmod(script, 0o644)
    done = subprocess.run(
        [SYSTEM_PYTHON, str(script), str(image.path), str(home / "scratch")],
        user="daemon", group="daemon", extra_groups=[], capture_output=True, text=True, cwd="/", check=False,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(source)},
    )  # fmt: skip
    assert done.stdout.split() == ["1", "True"], done.stderr
    assert os.listdir(home / "scratch") == []
