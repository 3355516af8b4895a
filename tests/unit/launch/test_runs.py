"""A run from Python, with a fake Slurm; the text that sbatch gets does what the shipped script does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from fake_slurm import FakeSlurm

from hpcrl.errors import ConfigError, EnvironmentFault, UserError
from hpcrl.launch import Outcome, Run, submit_run
from hpcrl.launch.runs import SCRIPT
from hpcrl.launch.script import after_option, run_script
from hpcrl.protocol.rundir import RunDir

ROOT = Path(__file__).parents[3]
SHIPPED = (ROOT / SCRIPT).read_text()


def blocks(text: str) -> list[list[str]]:
    """Directives by component."""
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if line == "#SBATCH hetjob":
            found.append([])
        elif line.startswith("#SBATCH"):
            found[-1].append(line.removeprefix("#SBATCH "))
    return found


def commands(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def test_the_text_equals_the_shipped_script_in_effect() -> None:
    text = run_script(SHIPPED, ["run it.yaml", "--set", "run.name=a b"])
    assert blocks(text) == blocks(SHIPPED)
    assert len(blocks(text)) == 3
    assert commands(text) == ["set -- 'run it.yaml' --set 'run.name=a b'", *commands(SHIPPED)]
    assert commands(SHIPPED)[-1].endswith('hpcrl.launch.batch "$@"')
    assert text.startswith("#!/bin/bash\n")


def test_options_come_last_in_their_component() -> None:
    text = run_script(SHIPPED, [], [after_option("43+0"), ":", "--nodes=7", "--qos=low"])
    first, second, third = blocks(text)
    shipped = blocks(SHIPPED)
    assert first == [*shipped[0], "--dependency=afterany:43"]
    assert second == [*shipped[1], "--nodes=7", "--qos=low"]
    assert third == shipped[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-N2"], "write --name=value"),
        (["--comment=a\nrm -rf x"], "write --name=value"),
        ([":", ":", ":", "--nodes=1"], "options for 4 components, but the script has 3"),
    ],
)
def test_options_that_cannot_be_written_into_it(options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_script(SHIPPED, [], options)


def test_after_what() -> None:
    with pytest.raises(UserError, match="expected the id of a job"):
        after_option("44+1")
    assert after_option(44) == "--dependency=afterany:44"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration that can be submitted, in a project's root."""
    monkeypatch.chdir(tmp_path)
    model, task = tmp_path / "model", tmp_path / "tasks" / "one"
    for folder in (model, task / "tests", tmp_path / "slurm"):
        folder.mkdir(parents=True)
    names = ("config.json", "m.safetensors", "tokenizer.json", "chat_template.jinja")
    for path in (*(model / name for name in names), task / "tests" / "test.sh"):
        path.write_text('{"model_type": "qwen3"}')
    (task / "task.toml").write_text("")
    (task / "instruction.md").write_text("Do it.")
    (tmp_path / SCRIPT).write_text(SHIPPED)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model": {"path": str(model)}, "tasks": {"train": str(task.parent)}}))
    return path


def test_sections_are_overridden_by_name(config: Path) -> None:
    slurm = FakeSlurm()
    run = submit_run(config, slurm=slurm, trainer={"steps": 20}, run={"name": "sweep"}, mode="sync")
    line = next(line for line in slurm.texts[0].splitlines() if line.startswith("set -- "))
    assert line == (
        f"set -- {config} --run-dir {run.root} --set trainer.steps=20 --set 'run.name=\"sweep\"' --set 'mode=\"sync\"'"
    )
    assert run.root.name.startswith("sweep-")
    assert run.status is Outcome.PENDING
    run.cancel()
    assert slurm.calls == ["cancel 44"]


def test_what_cannot_be_is_refused_before_anything_is_submitted(config: Path) -> None:
    slurm = FakeSlurm()
    with pytest.raises(ConfigError, match=r"trainer\.stepz"):
        submit_run(config, slurm=slurm, trainer={"stepz": 20})
    with pytest.raises(UserError, match=r"trainer\.steps: range is no value"):
        submit_run(config, slurm=slurm, trainer={"steps": range(3)})
    with pytest.raises(UserError, match=r"give a list, one option an element: \['--nodes=2'"):
        submit_run(config, slurm=slurm, sbatch="--nodes=2")
    with pytest.raises(UserError, match="no arrays of heterogeneous jobs; submit one run for each element"):
        submit_run(config, slurm=slurm, sbatch=["--array=0-3"])
    assert not slurm.texts


def test_a_run_directory_may_be_text(config: Path, tmp_path: Path) -> None:
    assert submit_run(config, run_dir="mine", slurm=FakeSlurm()).root == tmp_path / "mine"


def test_elsewhere_the_first_thing_said_is_where_to_go(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    with pytest.raises(EnvironmentFault, match="is not here; call this from the project's root directory"):
        submit_run(config, slurm=FakeSlurm(), model={"path": "relative"})


@pytest.mark.parametrize(
    ("slurm_says", "recorded", "status"),
    [
        ("RUNNING", None, Outcome.RUNNING),
        ("RUNNING", "failed", Outcome.RUNNING),  # the record of an earlier end: the run is continued
        ("COMPLETED", "success", Outcome.SUCCESS),
        ("FAILED", "failed", Outcome.FAILURE),
        ("FAILED", "timeout", Outcome.TIMEOUT),
        ("NODE_FAIL", "cancelled", Outcome.NODE_FAILURE),
        ("PREEMPTED", "cancelled", Outcome.PREEMPTED),
        ("CANCELLED", None, Outcome.CANCELLED),
        (None, "cancelled", Outcome.CANCELLED),
        (None, "success", Outcome.SUCCESS),
        (None, None, Outcome.UNKNOWN),
    ],
)
def test_the_status_of_a_run(tmp_path: Path, slurm_says: str | None, recorded: str | None, status: Outcome) -> None:
    slurm = FakeSlurm()
    slurm.jobs = {} if slurm_says is None else {f"44+{index}": slurm_says for index in range(3)}
    run = Run(tmp_path, "44", slurm)
    if recorded is not None:
        RunDir(tmp_path).end.write_text(json.dumps({"state": recorded, "reason": "r"}))
    assert run.status is status


def test_waiting_has_an_end(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    slurm.jobs = {"44+0": "PENDING"}
    with pytest.raises(TimeoutError, match=r"\(job 44\) is still pending after 0 s"):
        Run(tmp_path, "44", slurm).wait(0)
    assert Run(tmp_path, "44", slurm).metrics() == {}
