"""``hpcrl tasks``: look at Harbor task directories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcrl.cli.errors import report_errors
from hpcrl.errors import UserError

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Check task directories."""


@app.command()
@report_errors
def check(folder: Annotated[Path, typer.Argument(help="A task directory, or a directory of them.")]) -> None:
    """Read every task; the first malformed one is named with its file and key."""
    from hpcrl.sandbox.tasks import list_tasks, load_task
    from hpcrl.scoring.tasks import load_private

    paths = [folder] if (folder / "task.toml").exists() else list_tasks(folder)
    if not paths:
        raise UserError(f"no task in {folder}; a task is a directory with task.toml and instruction.md")
    for path in paths:
        load_task(path)
        load_private(path)
    print(f"{len(paths)} tasks in {folder} are well-formed")
