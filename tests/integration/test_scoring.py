"""Scoring with real containers: verdicts, whose fault a missing one is, and that private tests stay private."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.errors import DataError, InfraError
from hpcrl.sandbox.images import Image, resolve
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.pool import SandboxPool
from hpcrl.sandbox.shell import ShellSandbox
from hpcrl.sandbox.tasks import sandbox_spec
from hpcrl.scoring.private import load_private
from hpcrl.scoring.runner import Score, score

pytestmark = pytest.mark.apptainer

ROOT = Path(__file__).parents[2]
LIMITS = Limits(command_timeout_s=20)
CHECK = 'if [ "$(cat out.txt)" = "$(cat /tests/expected)" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt'


@pytest.fixture(scope="module")
def image() -> Image:
    return resolve(str(ROOT / "containers/sandbox.def"))


class Bench:
    """A task whose test script is given, an agent that runs one command, and the score."""

    def __init__(self, base: Path, image: Image) -> None:
        self.base, self.image = base, image
        self.task = base / "task"
        (self.task / "environment" / "files").mkdir(parents=True)
        (self.task / "environment" / "files" / "out.txt").write_text("wrong\n")
        (self.task / "tests").mkdir()
        (self.task / "tests" / "expected").write_text("right\n")
        (self.task / "instruction.md").write_text("Make out.txt right.\n")
        (self.task / "task.toml").write_text(
            'version = "1.0"\n[verifier]\ntimeout_sec = 1.5\n[environment]\nmemory_mb = 256\n'
        )

    def score(self, command: str, test: str = CHECK, artifact: bytes | None = None) -> Score:
        (self.task / "tests" / "test.sh").write_text(test)
        task = load_private(self.task)

        async def main() -> Score:
            async with SandboxPool(backend="apptainer", start_concurrency=2, scratch=self.base / "scratch") as pool:
                packed = artifact
                if packed is None:
                    async with pool.sandbox(sandbox_spec(task.public, self.image, LIMITS)) as sandbox:
                        assert (
                            await sandbox.run("ls /tests /logs/verifier 2>/dev/null")
                        ).output == "/logs/verifier:\n\n/tests:\n"
                        await sandbox.run(command)
                        packed = await sandbox.artifact()
                return await score(task, packed, self.image, LIMITS, pool)

        return asyncio.run(main())


@pytest.fixture
def bench(image: Image) -> Iterator[Bench]:
    # Not below pytest's own directories: run by root, sandboxes are user nobody, who cannot pass through those.
    base = Path(tempfile.mkdtemp(prefix="hpcrl-test-"))
    os.chmod(base, 0o711)
    yield Bench(base, image)
    shutil.rmtree(base)


def test_verdicts(bench: Bench) -> None:
    solved = bench.score("echo right > out.txt")
    assert (solved.reward, solved.rewards, solved.policy_failure) == (1.0, {"reward": 1.0}, None)
    assert solved.duration_s > 0 and solved.verifier_version.startswith("sha256-")
    assert bench.score("true").reward == 0.0


def test_reward_json_and_workdir(bench: Bench) -> None:
    test = 'pwd; echo \'{"style": 0.5, "tests": 1}\' > /logs/verifier/reward.json; exit 1'
    got = bench.score("true", test)
    assert got.rewards == {"style": 0.5, "tests": 1.0} and got.reward == 0.75 and got.detail == "/work\n"


def test_a_link_to_the_private_tests_does_not_help(bench: Bench) -> None:
    assert bench.score("ln -sf /tests/expected out.txt").reward == 0.0
    assert bench.score("ln -sf ../tests/expected out.txt").reward == 0.0


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("exit 0", "no_reward"),
        ("echo nan > /logs/verifier/reward.txt", "bad_reward"),
        ("echo done > /logs/verifier/reward.txt", "bad_reward"),
        ("echo '[1]' > /logs/verifier/reward.json", "bad_reward"),
        ("ln -s /etc/passwd /logs/verifier/reward.txt", "bad_reward"),
        ("cd /logs/verifier; echo 0 > reward.txt; echo '{\"reward\": 1}' > reward.json", "bad_reward"),
        ("echo 0 > /logs/verifier/reward.txt; kill -KILL $$", "verifier_killed"),
    ],
)
def test_a_broken_verifier_is_infra(bench: Bench, test: str, reason: str) -> None:
    with pytest.raises(InfraError) as caught:
        bench.score("true", test)
    assert caught.value.reason == reason


def test_a_verifier_that_overruns_scores_zero_as_policy(bench: Bench) -> None:
    got = bench.score("true", "echo 1 > /logs/verifier/reward.txt; while :; do :; done")
    assert (got.reward, got.rewards, got.policy_failure) == (0.0, {}, "verifier_timeout")


def test_what_is_left_running_cannot_change_the_reward(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    late = "(sleep 0.3; echo 1 > /logs/verifier/reward.txt) & echo 0 > /logs/verifier/reward.txt"
    read = ShellSandbox.read_mount

    async def slow(self: ShellSandbox, target: str, path: str, max_bytes: int = 1 << 20) -> bytes:
        await asyncio.sleep(0.6)
        return await read(self, target, path, max_bytes)

    monkeypatch.setattr(ShellSandbox, "read_mount", slow)
    assert bench.score("true", late).reward == 0.0


def test_an_artifact_that_is_none_is_data(bench: Bench) -> None:
    with pytest.raises(DataError):
        bench.score("true", artifact=b"not an archive")


@pytest.mark.parametrize("index", [0, 3])
def test_repair_tasks(bench: Bench, index: int) -> None:
    tasks = sorted((ROOT / "tasks/repair/eval").glob("*/"))
    if not tasks:
        pytest.skip("the repair task set is not here")
    bench.task = tasks[index]
    task = load_private(bench.task)
    assert task.solution is not None
    solution = task.solution.read_text()

    async def main() -> tuple[float, float]:
        rewards = []
        async with SandboxPool(backend="apptainer", start_concurrency=2, scratch=bench.base / "scratch") as pool:
            for command in (solution, "true"):
                async with pool.sandbox(sandbox_spec(task.public, bench.image, LIMITS)) as sandbox:
                    await sandbox.run(command)
                    artifact = await sandbox.artifact()
                rewards.append((await score(task, artifact, bench.image, LIMITS, pool)).reward)
        return rewards[0], rewards[1]

    assert asyncio.run(main()) == (1.0, 0.0)
