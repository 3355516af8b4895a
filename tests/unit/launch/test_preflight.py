"""What is seen wrong before anything starts, each as one line that names the thing."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from hpcrl.config import RunConfig, parse_config
from hpcrl.errors import UserError
from hpcrl.launch import job
from hpcrl.launch.job import create_run, new_run_dir
from hpcrl.launch.preflight import check_fresh, check_inputs, check_resumable, find_mpiexec, require_commands
from hpcrl.protocol.rundir import publish_text


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A configuration whose model and tasks are there."""
    model, task = tmp_path / "model", tmp_path / "tasks" / "one"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (model / name).write_text('{"model_type": "qwen3"}')
    (task / "tests").mkdir(parents=True)
    (task / "task.toml").write_text("[agent]\ntimeout_sec = 5\n")
    (task / "instruction.md").write_text("Do it.")
    (task / "tests" / "test.sh").write_text("#!/bin/sh\n")
    return parse_config(
        {"run": {"dir": str(tmp_path / "runs")}, "model": {"path": str(model)}, "tasks": {"train": str(task.parent)}}
    )


def refused(config: RunConfig) -> str:
    with pytest.raises(UserError) as caught:
        check_inputs(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_good_inputs_pass(config: RunConfig) -> None:
    check_inputs(config)


@pytest.mark.parametrize(
    ("name", "what"),
    [("config.json", "the model's configuration"), ("model.safetensors", "weights"), ("tokenizer.json", "a tokenizer")],
)
def test_an_incomplete_model_directory(config: RunConfig, name: str, what: str) -> None:
    (Path(config.model.path) / name).unlink()
    message = refused(config)
    assert message.startswith(f"model.path: {config.model.path} has no ")
    assert what in message


def test_a_missing_model_directory(config: RunConfig) -> None:
    gone = config.model_copy(update={"model": config.model.model_copy(update={"path": "/nowhere/m"})})
    assert refused(gone).startswith("model.path: /nowhere/m is not a directory; it must hold config.json")


@pytest.mark.parametrize("key", ["train", "eval"])
def test_missing_and_empty_task_directories(config: RunConfig, tmp_path: Path, key: str) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    tasks = config.tasks.model_copy(update={key: "/nowhere/t"})
    assert refused(config.model_copy(update={"tasks": tasks})).startswith(f"tasks.{key}: cannot read /nowhere/t: No")
    tasks = config.tasks.model_copy(update={key: str(empty)})
    assert refused(config.model_copy(update={"tasks": tasks})).startswith(f"tasks.{key}: {empty} holds no task")


def test_a_malformed_task_is_named_with_file_and_key(config: RunConfig) -> None:
    task = Path(config.tasks.train) / "one"
    (task / "task.toml").write_text("[agent]\ntimeout_sec = 'long'\n")
    assert f"{task / 'task.toml'}: [agent] timeout_sec is 'long'" in refused(config)
    (task / "task.toml").write_text("[agent\n")
    assert str(task / "task.toml") in refused(config)


def test_a_task_without_private_tests_is_refused(config: RunConfig) -> None:
    task = Path(config.tasks.train) / "one"
    (task / "tests" / "test.sh").unlink()
    assert "test.sh" in refused(config)


@pytest.mark.parametrize("key", ["train", "eval"])
def test_a_verifier_that_may_outlast_its_scoring_lease(config: RunConfig, key: str) -> None:
    tasks = config.tasks.model_copy(update={key: config.tasks.train})
    task = Path(config.tasks.train) / "one"
    (task / "task.toml").write_text("[verifier]\ntimeout_sec = 840\n")
    check_inputs(config.model_copy(update={"tasks": tasks}))
    scoring = config.scoring.model_copy(update={"lease_s": 899.0})
    assert refused(config.model_copy(update={"tasks": tasks, "scoring": scoring})) == (
        f"task {task}: its verifier may take 840 s ([verifier] timeout_sec in task.toml), too long for scoring.lease_s: 899; "
        "set scoring.lease_s to at least 900, or lower timeout_sec"
    )


def test_a_directory_between_the_tasks_that_is_none(config: RunConfig) -> None:
    """The coordinator would hand it out."""
    (Path(config.tasks.train) / "notes").mkdir()
    assert "notes is no task: it has no task.toml" in refused(config)


def test_a_fresh_run_directory(config: RunConfig) -> None:
    root = new_run_dir(config)
    assert root.parent == Path(config.run.dir)
    assert root != new_run_dir(config)
    check_fresh(root)
    run = create_run(root, config)
    assert stat.S_IMODE(run.token.stat().st_mode) == 0o600
    with pytest.raises(UserError, match=f"{root} already holds a run; .* --resume {root}"):
        check_fresh(root)
    before = run.secret()
    with pytest.raises(UserError, match="already holds a run"):
        create_run(root, config)
    assert run.secret() == before


def test_paths_in_the_resolved_configuration_are_absolute(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpcrl.config import load_config

    monkeypatch.chdir(tmp_path)
    (tmp_path / "box.def").touch()
    relative = parse_config(
        {
            "run": {"dir": "runs"},
            "model": {"path": "model"},
            "tasks": {"train": "tasks", "eval": "tasks"},
            "sandbox": {"image": "box.def"},
        }
    )
    run = create_run(tmp_path / "run", relative)
    resolved = load_config(run.config)
    assert resolved.model.path == str(tmp_path / "model")
    assert (resolved.tasks.train, resolved.tasks.eval) == (str(tmp_path / "tasks"),) * 2
    assert resolved.sandbox.image == str(tmp_path / "box.def")
    assert resolved.run.dir == str(tmp_path / "runs")

    found, _ = job._open(run.root, relative, True)  # a resume may bring relative paths again
    assert load_config(found.config) == resolved


def test_the_name_of_a_cached_image_stays_a_name(config: RunConfig, tmp_path: Path) -> None:
    from hpcrl.config import load_config

    named = config.model_copy(update={"sandbox": config.sandbox.model_copy(update={"image": "python:3.12"})})
    assert load_config(create_run(tmp_path / "run", named).config).sandbox.image == "python:3.12"


def test_only_a_run_at_rest_can_be_resumed(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run there \(config\.resolved\.yaml is missing\)"):
        check_resumable(tmp_path / "nothing")
    run = create_run(tmp_path / "run", config)
    check_resumable(run.root)  # cut off before its coordinator came up
    run.announce("coordinator", "http://127.0.0.1:9")
    check_resumable(run.root)  # cut off: nobody answers there
    publish_text(run.end, "{}")
    check_resumable(run.root)


def test_a_missing_command_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="srun is not on PATH"):
        require_commands("srun")


def test_the_mpiexec_beside_this_python_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(UserError, match="mpiexec is not on PATH"):
        find_mpiexec()
    for folder in ("bin", "venv"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mpiexec").touch(mode=0o755)
        assert find_mpiexec() == str(tmp_path / folder / "mpiexec")


def test_a_run_directory_that_cannot_be_made(config: RunConfig, tmp_path: Path) -> None:
    from hpcrl.errors import EnvironmentFault

    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match=r"cannot make the run directory .*: Not a directory; set run\.dir"):
        create_run(tmp_path / "file" / "run", config)


def test_a_model_that_cannot_chat_or_be_read_is_refused(config: RunConfig) -> None:
    model = Path(config.model.path)
    (model / "chat_template.jinja").unlink()
    (model / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    assert "has no chat template" in refused(config)
    (model / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    check_inputs(config)
    for content in ("{", "{}", "[1]"):
        (model / "config.json").write_text(content)
        assert "config.json" in refused(config)


def test_a_resume_that_is_refused_leaves_the_run_as_it_was(config: RunConfig, tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", config)
    kept = {run.end: "end", run.trained: "trained", run.final_status: "status", run.config: run.config.read_text()}
    for path, text in kept.items():
        publish_text(path, text)
    other = config.model_copy(update={"mode": "sync"})
    found, before = job._open(run.root, other, True)
    assert found.config.read_text() != before == kept[run.config]
    with pytest.raises(UserError), job._recorded(found, before):
        raise UserError("a check did not pass")
    assert {path: path.read_text() for path in kept} == kept

    found, before = job._open(run.root, other, True)
    with pytest.raises(UserError), job._recorded(found, before) as record:
        record.begin()
        assert not run.end.exists() and not run.trained.exists()
        raise UserError("a role died")
    assert "a role died" in run.end.read_text()
    assert run.config.read_text() != kept[run.config]
