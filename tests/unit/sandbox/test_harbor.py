from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.errors import UserError
from hpcrl.sandbox.artifact import Declared
from hpcrl.sandbox.harbor import remarks
from hpcrl.sandbox.tasks import load_task, read_toml


@pytest.fixture
def task(tmp_path: Path) -> Path:
    (tmp_path / "environment").mkdir()
    (tmp_path / "instruction.md").write_text("Do it.")
    return tmp_path


def write(task: Path, text: str) -> Path:
    (task / "task.toml").write_text(text)
    return task


@pytest.mark.parametrize(
    "version", ['version = "1.0"', 'schema_version = "1.1"', 'schema_version = "1.4"', "version = 1.0", ""]
)
def test_known_versions(task: Path, version: str) -> None:
    assert load_task(write(task, version)).instruction == "Do it."


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('schema_version = "2.0"', "schema_version is '2.0'; known are 1.0 to 1.4"),
        ("[[steps]]\nname = 'a'", "[[steps]] (a task of several steps)"),
        ("[environment]\nos = 'windows'", "[environment] os"),
        ("[environment]\ngpus = 1", "[environment] gpus"),
        ("[[environment.mcp_servers]]\nname = 'a'", "mcp_servers"),
        ("[environment.healthcheck]\ncommand = 'true'", "healthcheck"),
        ("[verifier.environment]\ncpus = 1", "[verifier.environment]"),
        ("[[verifier.collect]]\ncommand = 'x'", "[[verifier.collect]]"),
        ("[verifier]\nenvironment_mode = 'own'", "environment_mode is 'own'"),
        (
            "[environment]\nenv = { A = '${KEY}' }",
            "[environment] env A is ${KEY}: sandboxes get nothing of the host's environment",
        ),
        ("[environment]\nmemory = '2 tons'", "memory is '2 tons'"),
        ("artifacts = 'x'", "artifacts must be a list"),
        ("artifacts = [3]", "artifacts must be a list of paths"),
        ("artifacts = [{source = '/work/a', service = 'db'}]", "the service 'db'"),
        (
            "artifacts = ['/etc/x']\n[verifier]\nenvironment_mode = 'separate'",
            "/etc/x, outside of the work directory /work",
        ),
        ("artifacts = ['../x']\n[verifier]\nenvironment_mode = 'separate'", "../x, outside"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(task: Path, text: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        load_task(write(task, text))
    assert words in str(caught.value) and "task.toml" in str(caught.value)


def test_several_containers_are_refused(task: Path) -> None:
    (task / "environment" / "docker-compose.yaml").touch()
    with pytest.raises(UserError, match=r"docker-compose\.yaml"):
        load_task(write(task, ""))


def test_values_as_harbor_writes_them(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A", "of the host")
    got = load_task(
        write(
            task,
            '[environment]\nmemory = "2G"\nstorage = "512M"\nenv = {A = "${A:-x y}", B = "${B:-}", C = "a ${A}"}\n',
        )
    )
    assert (got.memory_mib, got.storage_mib) == (2048, 512)
    assert got.env == {"A": "x y", "B": "", "C": "a ${A}"}
    assert load_task(write(task, '[environment]\nmemory = "2G"\nmemory_mb = 64\n')).memory_mib == 64


def test_the_work_directory_of_the_tasks_own_image(task: Path) -> None:
    (task / "environment" / "Dockerfile").write_text("FROM x\nWORKDIR /app\n")
    assert load_task(write(task, "")).workdir == "/app"
    assert load_task(write(task, '[environment]\nworkdir = "/srv/x"\n')).workdir == "/srv/x"


def test_declared_artifacts(task: Path) -> None:
    text = 'artifacts = ["out.txt", {source = "/work", exclude = [".git"]}]\n'
    assert load_task(write(task, text)).artifacts is None
    got = load_task(write(task, text + '[verifier]\nenvironment_mode = "separate"\n')).artifacts
    assert got == (Declared("out.txt"), Declared(".", (".git",)))


@pytest.mark.parametrize(
    ("declared", "path", "kept"),
    [
        (Declared("."), "a/b", True),
        (Declared("a"), "a", True),
        (Declared("a"), "a/b", True),
        (Declared("a"), "ab", False),
        (Declared(".", (".git",)), ".git/config", False),
        (Declared(".", (".git",)), "sub/.git", False),
        (Declared(".", ("tests/a.py",)), "tests/a.py", False),
        (Declared(".", ("tests/a.py",)), "tests/b.py", True),
        (Declared("a", ("*.pyc",)), "a/b/c.pyc", False),
    ],
)
def test_what_a_declaration_keeps(declared: Declared, path: str, kept: bool) -> None:
    assert declared.keeps(path) is kept


def test_remarks(task: Path) -> None:
    write(task, '[agent]\nuser = "bob"\n[environment]\nallow_internet = true\n')
    (task / "environment" / "Dockerfile").touch()
    network, user, dockerfile = remarks(read_toml(task / "task.toml"), task)
    assert "network" in network and "'bob'" in user and "not built" in dockerfile
    assert remarks({"environment": {"network_mode": "no-network", "image": "x"}}, task) == []
