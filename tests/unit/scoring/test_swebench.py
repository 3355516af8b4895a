from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hpcrl.errors import UserError
from hpcrl.sandbox.artifact import Declared
from hpcrl.scoring.private import load_private
from hpcrl.scoring.swebench import convert_file

ROW: dict[str, Any] = {
    "instance_id": "psf__requests-1",
    "repo": "psf/requests",
    "base_commit": "abc",
    "problem_statement": "It is {broken}.",
    "patch": "--- a/src.py\n+++ b/src.py\n@@ -1 +1 @@\n-a\n+b",
    "test_patch": (
        "--- a/tests/test_a.py\n+++ b/tests/test_a.py\n@@ -1 +1 @@\n-a\n+b\n"
        "--- /dev/null\n+++ b/tests/new.txt\n@@ -0,0 +1 @@\n+x\n"
    ),
    "FAIL_TO_PASS": '["tests/test_a.py::t1"]',
    "PASS_TO_PASS": ["tests/test_a.py::t2[a b]"],
}


def file_of(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_row_becomes_a_task(tmp_path: Path) -> None:
    [path] = convert_file(file_of(tmp_path, ROW), tmp_path / "out")
    task = load_private(path)
    assert task.public.instruction.startswith("It is {broken}.") and task.public.workdir == "/testbed"
    assert task.public.image == "swebench/sweb.eval.x86_64.psf_1776_requests-1:latest"
    assert task.public.artifacts == (Declared(".", (".git", "tests/new.txt", "tests/test_a.py")),)
    assert (path / "tests/expected.txt").read_text().splitlines() == ["tests/test_a.py::t1", "tests/test_a.py::t2[a b]"]
    assert "python -m pytest -rA -p no:cacheprovider tests/test_a.py >" in (path / "tests/test.sh").read_text()
    assert (path / "solution/fix.patch").read_text().endswith("+b\n")
    assert tomllib.loads((path / "task.toml").read_text())["metadata"]["repo"] == "psf/requests"


@pytest.mark.parametrize("kind", ["one", "list", "lines"])
def test_forms_of_the_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rows"
    path.write_text(
        {"one": json.dumps(ROW, indent=1), "list": json.dumps([ROW]), "lines": json.dumps(ROW) + "\n\n"}[kind]
    )
    assert [task.name for task in convert_file(path, tmp_path / "out")] == ["psf__requests-1"]


def test_image_and_command_of_the_row(tmp_path: Path) -> None:
    row = {**ROW, "docker_image": "own:{instance_id}", "test_cmd": ["cd x", "make test"]}
    [path] = convert_file(file_of(tmp_path, row), tmp_path / "a")
    assert (
        load_private(path).public.image == "own:psf__requests-1"
        and "cd x && make test >" in (path / "tests/test.sh").read_text()
    )
    [path] = convert_file(file_of(tmp_path, row), tmp_path / "b", "/images/{repo}")
    assert load_private(path).public.image == "/images/psf/requests"


def test_django_has_labels(tmp_path: Path) -> None:
    row = {
        **ROW,
        "repo": "django/django",
        "test_patch": ROW["test_patch"].replace("tests/test_a.py", "tests/auth/test_b.py"),
    }
    [path] = convert_file(file_of(tmp_path, row), tmp_path / "out")
    assert "--parallel 1 auth.test_b >" in (path / "tests/test.sh").read_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"patch": ""}, "patch must be a text"),
        ({"instance_id": "../x"}, "no plain name"),
        ({"FAIL_TO_PASS": "[]"}, "doing nothing would solve it"),
        ({"FAIL_TO_PASS": "x"}, "neither a list"),
        ({"PASS_TO_PASS": [1]}, "list of test names"),
        ({"repo": "sympy/sympy"}, "give test_cmd"),
        ({"test_patch": "--- a/x.txt\n+++ b/x.txt\n"}, "touches no Python file"),
        ({"docker_image": "{other}"}, "only {instance_id} and {repo}"),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_written(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        convert_file(file_of(tmp_path, {**ROW, "instance_id": "good"}, {**ROW, **change}), tmp_path / "out")
    assert words in str(caught.value) and not (tmp_path / "out").exists()


def test_files_that_are_none_and_tasks_that_are_there(tmp_path: Path) -> None:
    for text, words in (
        ("", "holds no instance"),
        ("{", "line 1"),
        ("[1]", "no JSON object"),
        ("{}", "has no instance_id, repo"),
    ):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(UserError, match=words):
            convert_file(tmp_path / "bad", tmp_path / "out")
    convert_file(file_of(tmp_path, ROW), tmp_path / "out")
    with pytest.raises(UserError, match="exists already"):
        convert_file(file_of(tmp_path, ROW), tmp_path / "out")
    with pytest.raises(UserError, match="is there twice"):
        convert_file(file_of(tmp_path, ROW, ROW), tmp_path / "other")


@pytest.mark.parametrize(
    ("output", "status"),
    [
        ("PASSED tests/test_a.py::t1\nPASSED tests/test_a.py::t2[a b]\n", 0),
        ("t1 ... ok\n", 1),
        ("PASSED tests/test_a.py::t1 - took long\nXFAIL tests/test_a.py::t2[a b] - why\n", 0),
        ("PASSED tests/test_a.py::t1\nFAILED tests/test_a.py::t2[a b] - assert 1\n", 1),
        ("tests/test_a.py::t1 ... ok\ntests/test_a.py::t2[a b] ... expected failure\n", 0),
        ("", 1),
    ],
)
def test_what_counts_as_passed(tmp_path: Path, output: str, status: int) -> None:
    [path] = convert_file(file_of(tmp_path, ROW), tmp_path / "out")
    script = (path / "tests/check.py").read_text().replace("/tests/expected.txt", str(path / "tests/expected.txt"))
    (tmp_path / "output").write_text(output)
    done = subprocess.run([sys.executable, "-I", "-c", script, str(tmp_path / "output")], capture_output=True)
    assert done.returncode == status
