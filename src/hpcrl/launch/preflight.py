"""Checks that cost no GPU: everything that can be seen wrong before a step starts, each as one clear line."""

from __future__ import annotations

import shutil
from pathlib import Path

from hpcrl.config import RunConfig
from hpcrl.errors import UserError

__all__ = ["check_inputs", "require_commands"]


def check_inputs(config: RunConfig) -> None:
    """Model and task directories are there and well-formed. Raises UserError."""
    from hpcrl.sandbox.tasks import list_tasks, load_task

    _check_model(Path(config.model.path))
    for key, folder in (("tasks.train", config.tasks.train), ("tasks.eval", config.tasks.eval)):
        if folder is None:
            continue
        if not Path(folder).is_dir():
            raise UserError(
                f"{key}: {folder} is not a directory; it must hold Harbor task directories (each with task.toml)"
            )
        for path in list_tasks(Path(folder)):
            load_task(path)


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


def require_commands(*names: str) -> None:
    """Raise UserError naming the first command that is not on PATH."""
    for name in names:
        if shutil.which(name) is None:
            raise UserError(f"{name} is not on PATH; load your site's Slurm/MPI modules, or use --launcher local")
