"""The repair tasks in real sandboxes: the solution scores 1, the untouched file and a wrong fix score 0."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.quickstart.demonstrations import LOOK, UNHELPFUL
from hpcrl.quickstart.families import FAMILIES, Problem
from hpcrl.quickstart.generate import eval_problems
from hpcrl.sandbox.images import resolve
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.pool import SandboxPool
from hpcrl.sandbox.tasks import sandbox_spec
from hpcrl.scoring.private import load_private
from hpcrl.scoring.runner import score

pytestmark = pytest.mark.apptainer

ROOT = Path(__file__).parents[2]
LIMITS = Limits(command_timeout_s=20)
FIRST_OF_FAMILY = {p.family: index for index, p in reversed(list(enumerate(eval_problems(0))))}


@pytest.fixture
def scratch() -> Iterator[Path]:
    # Run by root, sandboxes are user nobody, who cannot pass through pytest's own directories.
    base = Path(tempfile.mkdtemp(prefix="hpcrl-test-"))
    os.chmod(base, 0o711)
    yield base
    shutil.rmtree(base)


async def play(scratch: Path, index: int, commands: list[str]) -> tuple[list[str], float]:
    """Outputs of ``commands`` in held-out task ``index``, and the reward."""
    image = resolve(str(ROOT / "containers/sandbox.def"))
    task = load_private(ROOT / f"tasks/repair/eval/repair-eval-{index:04d}")
    async with SandboxPool(backend="apptainer", start_concurrency=1, scratch=scratch) as pool:
        async with pool.sandbox(sandbox_spec(task.public, image, LIMITS)) as sandbox:
            outputs = [(await sandbox.run(command)).output for command in commands]
            artifact = await sandbox.artifact()
        return outputs, (await score(task, artifact, image, LIMITS, pool)).reward


def problem_of(family: str) -> tuple[int, Problem]:
    index = FIRST_OF_FAMILY[family]
    return index, eval_problems(0)[index]


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_the_solution_passes(family: str, scratch: Path) -> None:
    index, problem = problem_of(family)
    outputs, reward = asyncio.run(play(scratch, index, [LOOK, problem.fix]))
    assert outputs == [problem.source, ""]
    assert reward == 1.0


def test_anything_else_fails(scratch: Path) -> None:
    index, problem = problem_of("operator")
    for commands in ([], [problem.wrong_fixes[0]], ["rm sol.py"], [f"echo 'while 1: pass\n{problem.source}' > sol.py"]):
        assert asyncio.run(play(scratch, index, commands))[1] == 0.0


def test_the_sandbox_answers_as_the_demonstrations_show(scratch: Path) -> None:
    index, _ = problem_of("operator")
    outputs, _ = asyncio.run(play(scratch, index, list(UNHELPFUL)))
    assert outputs == list(UNHELPFUL.values())
