"""SWE-bench-style instances → Harbor tasks, one directory each.

    instance   instance_id, repo, base_commit, problem_statement, patch, test_patch, FAIL_TO_PASS, PASS_TO_PASS (a list, or its JSON)
               optional: test_cmd, docker_image or image_name
    task       instruction.md: the problem · solution/: the patch · tests/: the test patch, what must pass, a script that tells

The image has the repository at base_commit in /testbed, git, and Python with what the tests need: the benchmark's own images do.
What the agent changed in files that the test patch touches, and in .git, does not reach the verifier. As in SWE-bench, the tests
import the code they test: such code can forge their output (docs/security.md).

Source: the fields of the SWE-bench dataset, https://www.swebench.com.
"""

from __future__ import annotations

import glob
import json
import re
import shlex
from pathlib import Path
from typing import Any

from hpcrl.errors import UserError
from hpcrl.protocol.rundir import publish_text

__all__ = ["convert_file", "read_instances", "write_task"]

_NEEDED = (
    "instance_id",
    "repo",
    "base_commit",
    "problem_statement",
    "patch",
    "test_patch",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
)
_IMAGE = "swebench/sweb.eval.x86_64.{instance_id}:latest"
_WORKDIR = "/testbed"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PYTEST = "python -m pytest -rA -p no:cacheprovider"
_COMMANDS = {
    "django/django": "python tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
    "sympy/sympy": "",
}
"""Repositories whose tests are not pytest's; empty: with a runner whose output is not understood."""

_TASK = """\
schema_version = "1.1"

[metadata]
source = "swebench"
repo = {repo}
base_commit = {base_commit}

[agent]
timeout_sec = 3600

[verifier]
timeout_sec = 1800
environment_mode = "separate"

[environment]
docker_image = {image}
workdir = "{workdir}"
memory_mb = 4096
storage_mb = 4096

[[artifacts]]
source = "{workdir}"
exclude = {exclude}
"""

_INSTRUCTION = """\
{problem}

The repository is in {workdir}. Change it so that the problem is solved.
"""

_SOLVE = """\
#!/bin/bash
set -e
git apply --whitespace=nowarn /solution/fix.patch
"""

_TEST = """\
#!/bin/bash
# 1 when every test of expected.txt passes, else 0; written last, in every case.
reward=0
if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate testbed; fi
if git apply --whitespace=nowarn /tests/test.patch; then
    {command} > /tmp/test-output 2>&1 < /dev/null
    if python3 -I /tests/check.py /tmp/test-output; then reward=1; fi
fi
echo "$reward" > /logs/verifier/reward.txt
"""

_CHECK = '''\
"""Status 0 when every expected test passed, by the test runner's output (pytest -rA, or Django's verbose one)."""
import re
import sys

passed = set()
with open(sys.argv[1], errors="replace") as output:
    for line in output:
        line = line.rstrip("\\n")
        pytest = re.match(r"(?:PASSED|XFAIL) (\\S.*?)(?: - .*)?$", line)
        django = re.match(r"(\\S.*?) \\.\\.\\. (?:ok|OK|expected failure)$", line)
        if pytest or django:
            passed.add((pytest or django).group(1).strip())
with open("/tests/expected.txt") as file:
    missing = [name for name in file.read().splitlines() if name not in passed]
for name in missing[:20]:
    print("not passed:", name)
sys.exit(1 if missing else 0)
'''


def convert_file(file: Path, out: Path, image: str | None = None) -> list[Path]:
    """Write every instance of ``file`` below ``out``, which must not hold any of them. Raises UserError before anything is written."""
    instances = read_instances(file)
    names = [instance["instance_id"] for instance in instances]
    for name in names:
        if (out / name).exists():
            raise UserError(f"{out / name} exists already: give another --out, or remove it")
        if names.count(name) > 1:
            raise UserError(f"{file}: instance {name} is there twice")
    for instance in instances:
        _command(instance)
        _image(instance, image)
    return [write_task(instance, out / instance["instance_id"], image) for instance in instances]


def read_instances(file: Path) -> list[dict[str, Any]]:
    """One instance, a list of them, or one per line. Raises UserError naming the instance and field."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read ({error})") from error
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = [_line(file, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    rows = parsed if isinstance(parsed, list) else [parsed]
    if not rows:
        raise UserError(f"{file}: holds no instance")
    return [_checked(row, f"{file}, instance {number}") for number, row in enumerate(rows, 1)]


def _line(file: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise UserError(f"{file}, line {number}: {error}; expected JSON, or one JSON object per line") from error


def _checked(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"{where}: is no JSON object")
    missing = [name for name in _NEEDED if name not in row]
    if missing:
        raise UserError(f"{where}: has no {', '.join(missing)}; a SWE-bench instance has {', '.join(_NEEDED)}")
    for name in ("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch"):
        if not isinstance(row[name], str) or not row[name].strip():
            raise UserError(f"{where}: {name} must be a text that is not empty")
    if not _NAME.fullmatch(row["instance_id"]):
        raise UserError(f"{where}: instance_id {row['instance_id']!r} is no plain name")
    for name in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        row = {**row, name: _names(row[name], f"{where}: {name}")}
    if not row["FAIL_TO_PASS"]:
        raise UserError(f"{where}: FAIL_TO_PASS is empty: doing nothing would solve it")
    return row


def _names(value: Any, where: str) -> list[str]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UserError(f"{where} is neither a list nor the JSON of one") from error
    if not isinstance(value, list) or not all(isinstance(name, str) and len(name.splitlines()) == 1 for name in value):
        raise UserError(f"{where} must be a list of test names, each of one line")
    return value


def write_task(instance: dict[str, Any], task: Path, image: str | None = None) -> Path:
    """Write one checked instance as the directory ``task``; returns it. Raises UserError."""
    files = {
        "task.toml": _TASK.format(
            repo=json.dumps(instance["repo"]),
            base_commit=json.dumps(instance["base_commit"]),
            image=json.dumps(_image(instance, image)),
            workdir=_WORKDIR,
            exclude=json.dumps([".git", *map(glob.escape, _touched(instance["test_patch"]))]),
        ),
        "instruction.md": _INSTRUCTION.format(problem=instance["problem_statement"].strip(), workdir=_WORKDIR),
        "solution/fix.patch": _ended(instance["patch"]),
        "solution/solve.sh": _SOLVE,
        "tests/test.patch": _ended(instance["test_patch"]),
        "tests/expected.txt": "\n".join([*instance["FAIL_TO_PASS"], *instance["PASS_TO_PASS"]]) + "\n",
        "tests/check.py": _CHECK,
        "tests/test.sh": _TEST.format(command=_command(instance)),
    }
    for name, content in files.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        publish_text(task / name, content)
    return task


def _ended(patch: str) -> str:
    return patch if patch.endswith("\n") else patch + "\n"


def _touched(patch: str) -> list[str]:
    """Files that a unified diff names, before and after."""
    found = re.findall(r"^(?:---|\+\+\+) [ab]/([^\t\n]+)", patch, re.MULTILINE)
    found += re.findall(r"^rename (?:from|to) (.+)$", patch, re.MULTILINE)
    return sorted(set(found))


def _image(instance: dict[str, Any], image: str | None) -> str:
    """``image`` filled in, else the instance's, else the benchmark's own."""
    template = image or instance.get("docker_image") or instance.get("image_name") or _IMAGE
    # The benchmark's images are named without double underscores, which a registry refuses.
    name = instance["instance_id"].lower().replace("__", "_1776_") if template == _IMAGE else instance["instance_id"]
    try:
        return str(template.format(instance_id=name, repo=instance["repo"]))
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(f"image {template!r}: only {{instance_id}} and {{repo}} are filled in") from error


def _command(instance: dict[str, Any]) -> str:
    """The shell command that runs the tests of the test patch."""
    given = instance.get("test_cmd")
    if given:
        return " && ".join(given) if isinstance(given, list) else str(given)
    files = [name for name in _touched(instance["test_patch"]) if name.endswith(".py")]
    if not files:
        raise UserError(f"instance {instance['instance_id']}: test_patch touches no Python file; give test_cmd")
    base = _COMMANDS.get(instance["repo"], _PYTEST)
    if not base:
        raise UserError(
            f"instance {instance['instance_id']}: the tests of {instance['repo']} are not pytest's; give test_cmd"
        )
    if instance["repo"] == "django/django":
        files = [name.removeprefix("tests/").removesuffix(".py").replace("/", ".") for name in files]
    return f"{base} {shlex.join(files)}"
