from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from hpcrl.errors import UserError
from hpcrl.quickstart import generate

COMMITTED = Path(__file__).parents[3] / "tasks" / "repair"


def tree(root: Path) -> dict[str, tuple[bytes, bool]]:
    """Path → (content, executable) of every file below train/ and eval/."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), os.access(path, os.X_OK))
        for name in ("train", "eval")
        for path in sorted((root / name).rglob("*"))
        if path.is_file()
    }


def test_committed_tasks_are_what_the_generator_writes(tmp_path: Path) -> None:
    generate.write_tasks(tmp_path, 0)
    fresh, committed = tree(tmp_path), tree(COMMITTED)
    assert sorted(fresh) == sorted(committed)
    assert [name for name in fresh if fresh[name] != committed[name]] == []


def test_counts_and_splits() -> None:
    train, held_out = generate.train_problems(0), generate.eval_problems(0)
    assert len({(p.instruction, p.source) for p in train}) == generate.TRAIN_TASKS == 512
    assert len({(p.instruction, p.source) for p in held_out}) == generate.EVAL_TASKS == 96
    assert {p.split for p in train} == {"train"}
    assert [p.split for p in held_out].count("combo") == 24
    assert [p.split for p in held_out].count("ident") == 72


def test_another_seed_gives_other_tasks() -> None:
    assert generate.train_problems(0, 20) != generate.train_problems(1, 20)


def test_a_task_holds_what_harbor_asks_for() -> None:
    files = generate.task_files(generate.train_problems(0, 1)[0])
    settings = tomllib.loads(files["task.toml"])
    assert settings["environment"]["workdir"] == "/work"
    assert settings["environment"]["allow_internet"] is False
    assert {"instruction.md", "tests/test.sh", "solution/solve.sh", "environment/files/sol.py"} <= set(files)


def test_nothing_the_agent_sees_tells_the_answer() -> None:
    for problem in generate.eval_problems(0):
        files = generate.task_files(problem)
        visible = files["instruction.md"] + files["environment/files/sol.py"]
        assert problem.fix not in visible and problem.reference not in visible


def test_existing_tasks_are_not_overwritten(tmp_path: Path) -> None:
    generate.write_tasks(tmp_path, 0, train=2, evaluation=1)
    with pytest.raises(UserError, match="--force"):
        generate.write_tasks(tmp_path, 1, train=2, evaluation=1)
    before = tree(tmp_path)
    generate.write_tasks(tmp_path, 1, train=1, evaluation=1, force=True)
    assert len(tree(tmp_path)) == len(before) * 2 // 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eval", "train"]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--out", str(tmp_path), "--train", "1", "--eval", "1"]
    assert generate.main(arguments) == 0
    assert generate.main(arguments) == UserError.exit_code
    assert "exists" in capsys.readouterr().err
