"""Stored artifacts scored with other tests: real verifiers, under the process backend."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from hpcrl.config import RunConfig
from hpcrl.coordinator.database import open_database
from hpcrl.errors import UserError
from hpcrl.protocol.rundir import RunDir
from hpcrl.run import rescore as module
from hpcrl.run.rescore import Rescored, new_verifiers, rescore, scores_file, stored_attempts, summary
from hpcrl.sandbox.artifact import pack
from hpcrl.sandbox.pool import SandboxPool
from hpcrl.scoring.artifacts import store_artifact

CHECK = 'grep -c right out.txt > "$HPCRL_MOUNT_1/reward.txt"; true'


def artifact(folder: Path, text: str) -> bytes:
    folder.mkdir()
    (folder / "out.txt").write_text(text)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return pack(descriptor, lambda _: True, (), 1 << 20)
    finally:
        os.close(descriptor)


@pytest.fixture
def task(tmp_path: Path) -> Path:
    folder = tmp_path / "new" / "t1"
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "test.sh").write_text(CHECK)
    (folder / "instruction.md").write_text("Do it.")
    (folder / "task.toml").write_text("")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Five attempts: right and wrong twice each in two tasks, one of them unscored; and one without an artifact."""
    found = RunDir(tmp_path / "run")
    found.create()
    right, wrong = (store_artifact(found, artifact(tmp_path / text, text)) for text in ("right", "wrong"))
    connection = open_database(found.database)
    attempts = [
        ("a0", "g1", right, 0.0),
        ("a1", "g1", right, 1.0),
        ("a2", "g1", wrong, 1.0),
        ("a3", "g1", wrong, None),
        ("a4", "g2", right, 1.0),
        ("a5", "g1", ("", ""), None),
    ]
    with connection:
        connection.executemany(
            "INSERT INTO groups (group_id, task_id, task_dir, split) VALUES (?, ?, '', 'train')",
            [("g1", "t1"), ("g2", "t2")],
        )
        connection.executemany(
            "INSERT INTO attempts (attempt_id, group_id, artifact, digest, environment_version, reward, verifier_version) "
            "VALUES (?, ?, ?, ?, '', ?, 'old')",
            [(name, group, path, digest, reward) for name, group, (path, digest), reward in attempts],
        )
    connection.close()
    return found


def again(run: RunDir, folder: Path) -> list[Rescored]:
    config = RunConfig.model_validate(
        {"model": {"path": "m"}, "tasks": {"train": "t"}, "sandbox": {"backend": "process"}}
    )

    async def main() -> list[Rescored]:
        async with SandboxPool(backend="process", start_concurrency=2, scratch=run.root.parent / "scratch") as pool:
            return await rescore(run, config, stored_attempts(run), new_verifiers(folder), pool, 2)

    return asyncio.run(main())


def test_what_changed_is_counted_and_old_scores_stay(run: RunDir, task: Path) -> None:
    before = stored_attempts(run)
    results = again(run, task.parent)
    assert [(r.attempt_id, r.old_reward, r.reward) for r in results] == [
        ("a0", 0.0, 1.0),
        ("a1", 1.0, 1.0),
        ("a2", 1.0, 0.0),
        ("a3", None, 0.0),
        ("a4", 1.0, None),
    ]
    assert (results[4].failure or "").startswith("no_verifier: the new tests have no task t2")
    got = summary(results)
    assert (got.attempts, got.same, got.raised, got.lowered, got.new, got.failed) == (5, 1, 1, 1, 1, 1)
    assert got.failures == {"no_verifier": 1} and got.mean_before == got.mean_after == pytest.approx(2 / 3)
    assert results[0].old_verifier == "old" and results[0].verifier.startswith("sha256-")
    assert stored_attempts(run) == before


def test_a_second_call_scores_only_what_failed(run: RunDir, task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = again(run, task.parent)
    path = scores_file(run, new_verifiers(task.parent))
    assert len(path.read_text().splitlines()) == 5
    with path.open("a") as file:
        file.write('{"attempt_id": "half a li')  # killed while writing
    called: list[str] = []
    real = module.load_artifact

    def counted(where: RunDir, relative: str, digest: str) -> bytes:
        called.append(digest)
        return real(where, relative, digest)

    monkeypatch.setattr(module, "load_artifact", counted)
    assert again(run, task.parent) == first
    assert called == []
    lines = path.read_text().splitlines()
    assert len(lines) == 7 and json.loads(lines[-1])["attempt_id"] == "a4"


def test_other_tests_go_to_another_file(run: RunDir, task: Path) -> None:
    again(run, task)
    (task / "tests" / "test.sh").write_text(CHECK.replace("right", "wrong"))
    assert [result.reward for result in again(run, task)] == [0.0, 0.0, 1.0, 1.0, None]
    assert len(list((run.root / "scores").glob("*.jsonl"))) == 2


def test_a_missing_and_a_damaged_artifact_are_named(run: RunDir, task: Path) -> None:
    attempts = stored_attempts(run)
    (run.root / attempts[0].artifact).unlink()
    (run.root / attempts[2].artifact).write_bytes(b"other")
    failures = [(result.failure or "").split(":")[0] for result in again(run, task)]
    assert failures == ["artifact_missing", "artifact_missing", "artifact_corrupt", "artifact_corrupt", "no_verifier"]
    assert attempts[0].digest in (again(run, task)[0].failure or "")


def test_two_at_once_are_refused(run: RunDir, task: Path) -> None:
    with module._opened(scores_file(run, new_verifiers(task))), pytest.raises(UserError, match="being written"):
        again(run, task)


def test_a_verifier_that_is_broken_gives_no_score(run: RunDir, task: Path) -> None:
    (task / "tests" / "test.sh").write_text("true")
    assert {(result.failure or "").split(":")[0] for result in again(run, task)} == {"no_reward", "no_verifier"}
