"""``hpcrl tasks check --quick``: every problem of every task, one line each.

What needs sandboxes is in integration/test_task_commands.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hpcrl.cli.main import app


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPCRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def add(folder: Path, name: str, toml: str = "") -> Path:
    task = folder / name
    (task / "tests").mkdir(parents=True)
    (task / "tests" / "test.sh").write_text("true")
    (task / "instruction.md").write_text("Do it.")
    (task / "task.toml").write_text(toml)
    return task


def check(folder: Path) -> Result:
    return CliRunner().invoke(app, ["tasks", "check", "--quick", str(folder)])


def test_good_tasks(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    own = add(tasks, "own", '[environment]\nimage = "root"\n')
    (own / "root" / "bin").mkdir(parents=True)
    (own / "root" / "bin" / "sh").touch()
    add(tasks, "plain")
    for place, count in ((tasks, 2), (own, 1)):
        result = check(place)
        assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, f"{count} of {count} tasks are well-formed")


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[agent]\ntimout_sec = 5\n", "unknown key [agent] timout_sec; did you mean timeout_sec?"),
        ('[environment]\nworkdir = "/usr"\n', "take another directory"),
        ('[verifier]\nenv = { "A B" = "1" }\n', "[verifier] env has 'A B', which is no name of a variable"),
        ('[environment]\nimage = "nowhere"\n', "image 'nowhere' is neither a directory, a .sif nor a .def file"),
        ('[environment]\ndocker_image = "python:3.12"\n', "docker://python:3.12"),
        ('[environment]\nimage = "image.def"\n', "its base must be pulled (docker://debian:12)"),
    ],
)
def test_one_problem_is_one_line(tmp_path: Path, toml: str, words: str) -> None:
    task = add(tmp_path / "tasks", "bad", toml)
    (task / "image.def").write_text("Bootstrap: docker\nFrom: debian:12\n")
    add(tmp_path / "tasks", "good")
    result = check(tmp_path / "tasks")
    assert result.exit_code == 2
    assert result.stderr == "hpcrl: 1 of 2 tasks have problems\n"
    [line] = [line for line in result.stdout.splitlines() if not line.startswith("note: ")][:-1]
    assert line.startswith(f"{task / 'task.toml'}: ")
    assert words in line


def test_all_problems_are_told(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    add(tasks, "a", '[agent]\ntimout_sec = 5\n[environment]\nimage = "nowhere"\n')
    (add(tasks, "b") / "tests" / "test.sh").unlink()
    result = check(tasks)
    assert result.exit_code == 2
    assert len([line for line in result.stdout.splitlines() if not line.startswith("note: ")]) == 4
    assert result.stderr == "hpcrl: 2 of 2 tasks have problems\n"


def test_what_a_run_builds_by_itself_is_only_noted(tmp_path: Path, cache: Path) -> None:
    task = add(tmp_path / "tasks", "builds", '[environment]\nimage = "image.def"\n')
    (task / "image.def").write_text("Bootstrap: debootstrap\nInclude: git\n")
    result = check(task)
    assert result.exit_code == 0
    assert f"note: image {task / 'image.def'} is not built yet: run tools/build-image" in result.stdout
    assert not cache.exists()


def test_several_places_and_json(tmp_path: Path) -> None:
    one, two = add(tmp_path / "x", "one"), add(tmp_path / "y", "two", "[[steps]]\nname = 'a'\n")
    result = CliRunner().invoke(app, ["tasks", "check", "--quick", "--json", str(one), str(two.parent)])
    assert result.exit_code == 2
    good, bad = json.loads(result.stdout)
    assert (good["task"], good["ok"], good["problems"]) == ("one", True, [])
    assert (bad["task"], bad["ok"]) == ("two", False) and "[[steps]]" in bad["problems"][0]


def test_a_directory_of_task_sets(tmp_path: Path) -> None:
    add(tmp_path / "train", "one")
    add(tmp_path / "eval", "two")
    (tmp_path / "notes").mkdir()
    result = check(tmp_path)
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "2 of 2 tasks are well-formed")


def test_an_unknown_agent_and_an_unknown_format_are_refused(tmp_path: Path) -> None:
    task = add(tmp_path, "one")
    result = CliRunner().invoke(app, ["tasks", "run", str(task), "--agent", "expert"])
    assert result.exit_code == 2 and "allowed are oracle, nothing and command:PROGRAM" in result.stderr
    result = CliRunner().invoke(
        app, ["tasks", "convert", "other", str(task / "task.toml"), "--out", str(tmp_path / "o")]
    )
    assert result.exit_code == 2 and "only swebench" in result.stderr
