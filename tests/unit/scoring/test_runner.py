"""From what a verifier did and left behind to a score or to whose fault a missing one is; the sandbox is a stand-in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpcrl.errors import InfraError, PolicyError
from hpcrl.sandbox.base import CommandResult
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.pool import SandboxPool
from hpcrl.scoring.private import PrivateTask, load_private
from hpcrl.scoring.runner import LOGS, Score, score


class StandIn:
    """A sandbox whose tests end as told; files may be read only once its processes have ended."""

    isolated = True
    read_only = False

    def __init__(self, result: CommandResult | PolicyError, files: dict[str, bytes], loose: bool) -> None:
        self.result, self.files, self.loose, self.finished = result, files, loose, False

    @asynccontextmanager
    async def sandbox(self, spec: object, name: str) -> AsyncIterator[StandIn]:
        yield self

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        if isinstance(self.result, PolicyError):
            raise self.result
        return self.result

    async def detached(self) -> bool:
        assert not self.finished, "all processes are gone by then"
        return self.loose

    async def locked(self, target: str, names: tuple[str, ...]) -> bool:
        assert self.finished and target == LOGS and set(names) == {"reward.txt", "reward.json"}
        return self.read_only

    async def finish(self) -> None:
        self.finished = True

    async def read_mount(self, target: str, path: str, max_bytes: int) -> bytes:
        assert self.finished, "the reward was read while processes could still write it"
        assert target == LOGS
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]


@pytest.fixture
def task(tmp_path: Path) -> PrivateTask:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test.sh").write_text("true\n")
    (tmp_path / "task.toml").write_text('version = "1.0"\n')
    (tmp_path / "instruction.md").write_text("Do it.\n")
    return load_private(tmp_path)


def ended(exit_code: int = 0, **flags: Any) -> CommandResult:
    values = {"output": "said", "timed_out": False, "truncated": False, "duration_s": 0.1, **flags}
    return CommandResult(exit_code=exit_code, **values)


def scored(task: PrivateTask, result: CommandResult | PolicyError, loose: bool = False, **files: bytes) -> Score:
    named = {name.replace("_", "."): content for name, content in files.items()}
    stand_in = cast(SandboxPool, StandIn(result, named, loose))
    image = cast(Any, SimpleNamespace(path=Path("/image")))
    return asyncio.run(score(task, b"", image, Limits(), stand_in))


def test_what_interrupted_tests_found_there_is_no_reward(task: PrivateTask) -> None:
    got = scored(task, ended(130), reward_txt=b"1\n")
    assert (got.reward, got.policy_failure) == (0.0, "verifier_interrupted")
    got = scored(task, ended(130), reward_txt=b"0\n")
    assert (got.reward, got.policy_failure) == (0.0, None)


def test_what_tests_could_not_have_written_is_no_reward(task: PrivateTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "read_only", True)
    got = scored(task, ended(), reward_json=b'{"reward": 1}')
    assert (got.reward, got.policy_failure) == (0.0, "verifier_locked")


@pytest.mark.parametrize("exit_code", [0, 1, 143])
def test_a_written_reward_is_the_score_whatever_the_exit_status(task: PrivateTask, exit_code: int) -> None:
    got = scored(task, ended(exit_code), reward_txt=b"0.5\n")
    assert (got.reward, got.rewards, got.policy_failure, got.detail) == (0.5, {"reward": 0.5}, None, "said")


def test_a_killed_verifier_has_given_no_verdict(task: PrivateTask) -> None:
    with pytest.raises(InfraError) as caught:
        scored(task, ended(137), reward_txt=b"0\n")
    assert caught.value.reason == "verifier_killed"


@pytest.mark.parametrize(
    ("result", "failure"),
    [
        (ended(137, timed_out=True), "verifier_timeout"),
        (ended(137, flooded=True), "verifier_output_limit"),
        (PolicyError("memory_limit"), "verifier_memory_limit"),
    ],
)
def test_what_the_artifact_broke_scores_zero(
    task: PrivateTask, result: CommandResult | PolicyError, failure: str
) -> None:
    got = scored(task, result, reward_txt=b"1\n")
    assert (got.reward, got.rewards, got.policy_failure) == (0.0, {}, failure)


def test_a_reward_that_a_loose_process_may_have_written_does_not_count(task: PrivateTask) -> None:
    got = scored(task, ended(), loose=True, reward_txt=b"1\n")
    assert (got.reward, got.rewards, got.policy_failure) == (0.0, {}, "verifier_background")
    got = scored(task, ended(), loose=True, reward_txt=b"-1\n")
    assert (got.reward, got.policy_failure) == (-1.0, None)
    for spoilt in ({}, {"reward_txt": b""}, {"reward_txt": b"1", "reward_json": b'{"reward": 1}'}):
        got = scored(task, ended(), loose=True, **spoilt)
        assert (got.reward, got.policy_failure) == (0.0, "verifier_background")


def test_a_second_reward_file_does_not_win(task: PrivateTask) -> None:
    for text, table in ((b"1", b'{"reward": 0}'), (b"0", b'{"reward": 1}')):
        with pytest.raises(InfraError, match=r"both reward\.txt and reward\.json") as caught:
            scored(task, ended(), reward_txt=text, reward_json=table)
        assert caught.value.reason == "bad_reward"


def test_no_reward_is_a_broken_verifier(task: PrivateTask) -> None:
    with pytest.raises(InfraError) as caught:
        scored(task, ended())
    assert caught.value.reason == "no_reward"
