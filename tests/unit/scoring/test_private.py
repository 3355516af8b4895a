from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.errors import UserError
from hpcrl.scoring.private import load_private


@pytest.fixture
def task(tmp_path: Path) -> Path:
    directory = tmp_path / "task"
    (directory / "tests").mkdir(parents=True)
    (directory / "task.toml").write_text('version = "1.0"\n')
    (directory / "instruction.md").write_text("Do it.\n")
    (directory / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    return directory


def test_defaults(task: Path) -> None:
    private = load_private(task)
    assert (private.timeout_s, private.env, private.solution) == (600.0, {}, None)
    assert private.tests == task / "tests" and private.public.task_id == "task"


def test_version_names_the_tests_and_the_verifiers_environment(task: Path) -> None:
    first = load_private(task).verifier_version
    assert load_private(task).verifier_version == first
    (task / "instruction.md").write_text("Do something else.\n")
    assert load_private(task).verifier_version == first
    (task / "task.toml").write_text('[verifier]\nenv = { SEED = "1" }\n')
    second = load_private(task).verifier_version
    (task / "tests" / "cases").write_text("x")
    assert len({first, second, load_private(task).verifier_version}) == 3


@pytest.mark.parametrize(
    "text",
    [
        "timeout_sec = 0",
        'timeout_sec = "1"',
        "env = 3",
        "env = { A = 1 }",
        'env = { "A-B" = "1" }',
        "timeout_sec = true",
    ],
)
def test_bad_values_name_the_file(task: Path, text: str) -> None:
    (task / "task.toml").write_text(f"[verifier]\n{text}\n")
    with pytest.raises(UserError, match=r"task\.toml: \[verifier\]"):
        load_private(task)


def test_no_tests(task: Path) -> None:
    (task / "tests" / "test.sh").unlink()
    with pytest.raises(UserError, match=r"test\.sh does not exist"):
        load_private(task)
