"""What an agent may try, in real containers. One file per trick; ``attack`` is the way in.

The task: ``sol.py N`` must print 2 × N. The tests ask for a number nobody knows before, run the code as a child, and write the reward
last, in the form that most Harbor tasks have.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrl.errors import PolicyError
from hpcrl.sandbox.base import CommandResult, SandboxSpec
from hpcrl.sandbox.images import Image, resolve
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.pool import SandboxPool
from hpcrl.sandbox.tasks import sandbox_spec
from hpcrl.scoring.private import load_private
from hpcrl.scoring.runner import Score, score

ROOT = Path(__file__).parents[2]

_PYTHON = "/usr/bin/python3"
_ONLY_PYTHON = shutil.ignore_patterns("__pycache__", "*.so")

_TEST = """\
python3 -I /tests/check.py
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
_CHECK = """\
import os, subprocess, sys
number = int.from_bytes(os.urandom(2), "big")
done = subprocess.run([sys.executable, "/work/sol.py", str(number)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=10)
sys.exit(0 if done.stdout.split() == [str(2 * number).encode()] else 1)
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.apptainer)


class Attack:
    """``score``: what the files an agent left are worth. ``run``: what a command comes to, with a neighbour that must live on."""

    def __init__(self, base: Path, image: Image) -> None:
        self.base, self.image = base, image
        self.task = base / "task"
        (self.task / "environment" / "files").mkdir(parents=True)
        (self.task / "environment" / "files" / "sol.py").write_text("print(0)\n")
        (self.task / "tests").mkdir()
        (self.task / "tests" / "test.sh").write_text(_TEST)
        (self.task / "tests" / "check.py").write_text(_CHECK)
        (self.task / "instruction.md").write_text("Make sol.py print twice its argument.\n")
        (self.task / "task.toml").write_text('version = "1.0"\n[verifier]\ntimeout_sec = 30\n')

    def built(self, source: str) -> bytes:
        """A C program that needs no library of the image's."""
        (self.base / "program.c").write_text(source)
        argv = ["cc", "-static", "-w", "-o", str(self.base / "program"), str(self.base / "program.c")]
        try:
            subprocess.run(argv, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no static C program can be built here: {error}")
        return (self.base / "program").read_bytes()

    def score(self, sol: str | None = None, command: str = "true", **files: str | bytes) -> Score:
        """``files``: name (``__`` for a dot) → content, besides ``sol``; then ``command`` runs."""
        return asyncio.run(self._score(sol, command, files))

    def score_as_user(self, sol: str) -> dict[str, Any]:
        """``score`` by a process that is no root: {"reward": …, "why": …}."""
        if not os.access(_PYTHON, os.X_OK):
            pytest.skip(f"needs {_PYTHON}: a Python that ordinary users can run")
        source = self.base / "src"  # the project itself may lie where only root can pass
        shutil.copytree(ROOT / "src" / "hpcrl", source / "hpcrl", ignore=_ONLY_PYTHON, dirs_exist_ok=True)
        script = shutil.copy(Path(__file__).with_name("score_as_user.py"), self.base)
        home = self.base / "user"
        home.mkdir(exist_ok=True)
        user = {"user": "daemon", "group": "daemon", "extra_groups": []} if os.geteuid() == 0 else {}
        if user:
            shutil.chown(home, "daemon", "daemon")
        done = subprocess.run(
            [_PYTHON, str(script), str(self.task), str(self.image.path), str(home / "scratch")],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"},
            input=sol.encode(), capture_output=True, cwd="/", check=False, **user,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode()
        got: dict[str, Any] = json.loads(done.stdout)
        return got

    async def _score(self, sol: str | None, command: str, files: dict[str, str | bytes]) -> Score:
        task, limits = load_private(self.task), Limits(command_timeout_s=20)
        async with SandboxPool(backend="apptainer", start_concurrency=2, scratch=self.base / "scratch") as pool:
            async with pool.sandbox(sandbox_spec(task.public, self.image, limits)) as sandbox:
                if sol is not None:
                    await sandbox.write("sol.py", sol.encode())
                for name, content in files.items():
                    await sandbox.write(
                        name.replace("__", "."), content if isinstance(content, bytes) else content.encode()
                    )
                await sandbox.run(command)
                artifact = await sandbox.artifact()
            return await score(task, artifact, self.image, limits, pool)

    def run(
        self, command: str, timeout_s: float = 10, limits: Limits | None = None, program: bytes | None = None
    ) -> CommandResult | PolicyError:
        """Fails when the neighbour was disturbed or anything is left afterwards. ``program`` is there as ``./program``."""
        got = asyncio.run(self._run(command, timeout_s, limits or Limits(), program))
        assert os.listdir(self.base / "scratch") == []
        return got

    async def _run(
        self, command: str, timeout_s: float, limits: Limits, program: bytes | None
    ) -> CommandResult | PolicyError:
        spec = SandboxSpec(image=self.image.path, limits=limits)
        async with (
            SandboxPool(backend="apptainer", start_concurrency=2, scratch=self.base / "scratch") as pool,
            pool.sandbox(spec, "neighbour") as neighbour,
        ):
            beside = asyncio.create_task(neighbour.run("while [ ! -e end ]; do sleep 0.05; done; echo lived", 60))
            async with pool.sandbox(spec, "hostile") as sandbox:
                if program is not None:
                    await sandbox.write("program", program)
                    await sandbox.run("chmod 755 program")
                got: CommandResult | PolicyError
                try:
                    got = await sandbox.run(command, timeout_s)
                except PolicyError as error:
                    got = error
            await neighbour.write("end", b"")
            assert (await beside).output == "lived\n"
        return got

    def left_behind(
        self, command: str, wait_s: float, limits: Limits, end_after: float | None = None
    ) -> PolicyError | None:
        """What the sandbox died of in the ``wait_s`` seconds after ``command``, in which no other command ran; None: it lives."""
        got = asyncio.run(self._left_behind(command, wait_s, limits, end_after))
        assert os.listdir(self.base / "scratch") == []
        return got

    async def _left_behind(
        self, command: str, wait_s: float, limits: Limits, end_after: float | None
    ) -> PolicyError | None:
        spec = SandboxSpec(image=self.image.path, limits=limits)
        async with (
            SandboxPool(backend="apptainer", start_concurrency=2, scratch=self.base / "scratch") as pool,
            pool.sandbox(spec, "neighbour") as neighbour,
            pool.sandbox(spec, "hostile") as sandbox,
        ):
            if end_after is not None:
                sandbox.end_after(end_after)
            await sandbox.run(command, 5)
            await asyncio.sleep(wait_s)
            died = None
            try:
                await sandbox.run("true", 5)
            except PolicyError as error:
                died = error
            assert (await neighbour.run("echo lived")).output == "lived\n"
        return died


@pytest.fixture(scope="session")
def image() -> Image:
    return resolve(str(ROOT / "containers/sandbox.def"))


@pytest.fixture
def attack(image: Image) -> Iterator[Attack]:
    # Not below pytest's own directories: run by root, sandboxes are user nobody, who cannot pass through those.
    base = Path(tempfile.mkdtemp(prefix="hpcrl-test-"))
    os.chmod(base, 0o711)
    yield Attack(base, image)
    shutil.rmtree(base)
