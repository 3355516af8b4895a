"""Each configuration in configs/ passes the checks before a submission and gives sbatch its script; the programs it names are there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpcrl.cli.main import app
from hpcrl.config import load_config

ROOT = Path(__file__).parents[3]
RUNS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if not path.name.startswith("devcluster"))
MODEL = "models/repair-qwen3"


def arguments(path: Path) -> list[str]:
    """Of ``submit``. A model that is not shipped (the file says where it comes from) is replaced by the quickstart's."""
    shipped = (ROOT / load_config(path).model.path).is_dir()
    return [str(path.relative_to(ROOT)), "--dry-run", *([] if shipped else ["--set", f"model.path={MODEL}"])]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_shipped_configuration_would_be_submitted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    answer = CliRunner().invoke(app, ["submit", *arguments(path)])
    assert answer.exit_code == 0, answer.output
    assert f"set -- configs/{path.name} --run-dir " in answer.output and "#SBATCH hetjob" in answer.output


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_the_program_of_a_shipped_configuration_can_be_started(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command = load_config(path).harness.command
    assert not command or shutil.which(command[0]) is not None
    for word in command:
        assert "/" not in word or os.access(word, os.R_OK), word
        if word.endswith(".py"):
            compile(Path(word).read_text(encoding="utf-8"), word, "exec")


def test_every_agent_has_its_configuration() -> None:
    named = {word for path in RUNS for word in load_config(path).harness.command}
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "configs/agents").iterdir() if path.is_file()} <= named
