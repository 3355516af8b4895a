"""Checks that cost no GPU: everything that can be seen wrong before a step starts, each as one clear line."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.config import RunConfig
from hpcrl.errors import InfraError, UserError
from hpcrl.protocol import client as api
from hpcrl.protocol.rundir import RunDir
from hpcrl.protocol.status import StatusRequest

if TYPE_CHECKING:
    from hpcrl.scoring.private import PrivateTask

__all__ = ["check_fresh", "check_inputs", "check_resumable", "find_mpiexec", "require_commands"]

_SCORING_MARGIN_S = 60.0
"""Of a scoring lease, kept for what comes before and after the verifier: artifact, sandbox start, report."""


def check_inputs(config: RunConfig) -> None:
    """Model and task directories are there; every task is well-formed, its private tests too, and can be scored in time.

    Raises UserError.
    """
    from hpcrl.coordinator.tasks import find_tasks
    from hpcrl.scoring.private import load_private

    _check_model(Path(config.model.path))
    for key, folder in (("tasks.train", config.tasks.train), ("tasks.eval", config.tasks.eval)):
        if folder is None:
            continue
        for task in find_tasks(folder, key):
            _check_verifier_time(load_private(Path(task.task_dir)), config.scoring.lease_s)


def _check_verifier_time(task: PrivateTask, lease_s: float) -> None:
    needed = task.timeout_s + _SCORING_MARGIN_S
    if needed > lease_s:
        raise UserError(
            f"task {task.public.directory}: its verifier may take {task.timeout_s:g} s ([verifier] timeout_sec in task.toml), "
            f"too long for scoring.lease_s: {lease_s:g}; set scoring.lease_s to at least {needed:g}, or lower timeout_sec"
        )


def _check_model(path: Path) -> None:
    if not path.is_dir():
        raise UserError(
            f"model.path: {path} is not a directory; it must hold config.json, *.safetensors and a tokenizer"
        )
    for pattern, what in (
        ("config.json", "the model's configuration"),
        ("*.safetensors", "weights"),
        ("tokenizer*", "a tokenizer"),
    ):
        if not any(path.glob(pattern)):
            raise UserError(f"model.path: {path} has no {pattern} ({what})")
    _json(path / "config.json")
    if not (path / "chat_template.jinja").is_file() and not _json(path / "tokenizer_config.json").get("chat_template"):
        raise UserError(
            f"model.path: the tokenizer in {path} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json); take a chat or instruct model, or add the template"
        )


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"model.path: {path} cannot be read: {error}") from error
    if not isinstance(content, dict) or not content:
        raise UserError(f"model.path: {path} holds no settings")
    return content


def check_fresh(root: Path) -> None:
    """``root`` holds no run yet. Raises UserError."""
    if RunDir(root).config.exists():
        raise UserError(f"{root} already holds a run; choose another --run-dir, or continue it with --resume {root}")


def check_resumable(root: Path) -> None:
    """``root`` holds a run, and nobody is at it. Raises UserError."""
    run = RunDir(root)
    if not run.config.exists():
        raise UserError(f"--resume {root}: no run there (config.resolved.yaml is missing)")
    if run.endpoint("coordinator") is None:
        return
    client = api.Client(run, "admin", patience_s=0.0)
    try:
        client.call(api.STATUS, StatusRequest())
    except InfraError:
        return  # its coordinator is gone: the run ended or was cut off
    finally:
        client.close()
    raise UserError(f"--resume {root}: this run is still running or just stopping; wait for its end, or stop it first")


def require_commands(*names: str) -> None:
    """Raise UserError naming the first command that is not on PATH."""
    for name in names:
        if shutil.which(name) is None:
            raise UserError(f"{name} is not on PATH; load your site's Slurm modules, or use --launcher local")


def find_mpiexec() -> str:
    """The mpiexec beside this Python (it belongs to the MPI library that mpi4py loads), else the one on PATH. Raises UserError."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise UserError("mpiexec is not on PATH; install an MPI library (tools/setup does) or load your site's module")
    return found
