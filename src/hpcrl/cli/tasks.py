"""``hpcrl tasks``: look at Harbor task directories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcrl.cli.errors import report_errors

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Check task directories."""


@app.command()
@report_errors
def check(folder: Annotated[Path, typer.Argument(help="A task directory, or a directory of them.")]) -> None:
    """Read every task; the first malformed one is named with its file and key, as is a sub-directory that is none."""
    from hpcrl.sandbox.tasks import list_tasks, load_task
    from hpcrl.scoring.private import load_private

    if (folder / "task.toml").exists():
        paths = [folder]
    else:
        list_tasks(folder)  # at least one; a run reads every sub-directory, so each must be a task
        paths = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    for path in paths:
        load_task(path)
        load_private(path)
    print(f"{len(paths)} tasks in {folder} are well-formed")
