from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.errors import UserError
from hpcrl.sandbox.images import Image
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.tasks import list_tasks, load_task, sandbox_spec

IMAGE = Image(Path("/image"), "sha256-i")


@pytest.fixture
def task(tmp_path: Path) -> Path:
    directory = tmp_path / "set" / "task-1"
    (directory / "environment" / "files").mkdir(parents=True)
    (directory / "environment" / "files" / "a.txt").write_text("a")
    (directory / "instruction.md").write_text("\nDo it.\n")
    (directory / "task.toml").write_text(
        'version = "1.0"\nunknown = 1\n[agent]\ntimeout_sec = 60\n[environment]\nworkdir = "/app"\nmemory_mb = 64\n'
        'storage_mb = 32\nenv = { A = "1" }\ndocker_image = "python:3.12"\n'
    )
    return directory


def test_fields(task: Path) -> None:
    got = load_task(task)
    assert (got.task_id, got.instruction, got.image, got.workdir, got.env) == (
        "task-1",
        "Do it.",
        "python:3.12",
        "/app",
        {"A": "1"},
    )
    assert (got.agent_timeout_s, got.memory_mib, got.storage_mib) == (60.0, 64, 32)
    assert list_tasks(task.parent) == [task]


def test_the_stricter_limit_holds(task: Path) -> None:
    spec = sandbox_spec(load_task(task), IMAGE, Limits(memory_bytes=1 << 30, disk_bytes=1 << 20))
    assert (spec.limits.memory_bytes, spec.limits.disk_bytes, spec.limits.file_bytes) == (64 << 20, 1 << 20, 32 << 20)
    assert spec.files == (task / "environment" / "files",) and spec.workdir == "/app"


def test_environment_version(task: Path) -> None:
    first = load_task(task).environment_version(IMAGE)
    assert load_task(task).environment_version(IMAGE) == first
    other = load_task(task).environment_version(Image(Path("/image"), "sha256-j"))
    (task / "environment" / "files" / "a.txt").write_text("b")
    assert len({first, other, load_task(task).environment_version(IMAGE)}) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[environment]\nworkdir = 3", "workdir is 3"),
        ('[environment]\nworkdir = "work"', "absolute path"),
        ('[environment]\nworkdir = "/"', "absolute path"),
        ('[environment]\nworkdir = "/../etc"', "absolute path"),
        ('[environment]\nworkdir = "//"', "absolute path"),
        ('[environment]\nworkdir = "/a:b"', "no comma, colon"),
        ('[environment]\nworkdir = "/a,b"', "no comma, colon"),
        ('[environment]\nworkdir = "/a\\nb"', "no comma, colon"),
        ('[environment]\nworkdir = "/usr"', "take another directory"),
        ('[environment]\nworkdir = "/etc/"', "take another directory"),
        ('[environment]\nworkdir = "/proc/x"', "take another directory"),
        ('[environment]\nworkdir = "/tests"', "take another directory"),
        ('[environment]\nworkdir = "/logs/verifier/x"', "take another directory"),
        ("[environment]\nmemory_mb = -1", "memory_mb"),
        ("[environment]\nenv = { A = 1 }", "[environment] env must map names to strings, but A is 1; put it in quotes"),
        ('[environment]\nenv = { "A-B" = "1" }', "'A-B', which is no name of a variable"),
        ('[environment]\nenv = { "" = "1" }', "'', which is no name of a variable"),
        ('[environment]\nenv = { A = "x\\u0000" }', "env must map"),
        ("[agent]\ntimeout_sec = true", "timeout_sec is True"),
        ("agent = 3", "must be a table"),
        ("[agent", "task.toml"),
    ],
)
def test_bad_values_name_file_and_key(task: Path, text: str, message: str) -> None:
    (task / "task.toml").write_text(text + "\n")
    with pytest.raises(UserError) as caught:
        load_task(task)
    assert message in str(caught.value) and "task.toml" in str(caught.value)


@pytest.mark.parametrize(
    "workdir", ["/work", "/app/", "/root", "/home/user", "/tmp/x", "/opt/my project", "/var/lib/x"]
)
def test_ordinary_work_directories_are_accepted(task: Path, workdir: str) -> None:
    (task / "task.toml").write_text(f'[environment]\nworkdir = "{workdir}"\n')
    assert load_task(task).workdir == workdir


def test_missing_files(task: Path, tmp_path: Path) -> None:
    (task / "instruction.md").write_text(" \n")
    with pytest.raises(UserError, match=r"instruction\.md: is empty"):
        load_task(task)
    (task / "instruction.md").unlink()
    with pytest.raises(UserError, match=r"instruction\.md"):
        load_task(task)
    with pytest.raises(UserError, match="is no task"):
        load_task(tmp_path)
    with pytest.raises(UserError, match="holds no tasks"):
        list_tasks(task)
