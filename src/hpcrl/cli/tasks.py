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
    """Read every task; the first malformed one is named with its file and key. Directories that are no tasks are named, too."""
    from hpcrl.sandbox.tasks import list_tasks, load_task
    from hpcrl.scoring.private import load_private

    paths = [folder] if (folder / "task.toml").exists() else list_tasks(folder)
    for path in paths:
        load_task(path)
        load_private(path)
    print(f"{len(paths)} tasks in {folder} are well-formed")
    others = (
        [] if paths == [folder] else sorted({p.name for p in folder.iterdir() if p.is_dir()} - {p.name for p in paths})
    )
    if others:
        print(
            f"not tasks, for want of a task.toml, and left out of a run: {', '.join(others[:10])}{' …' * (len(others) > 10)}"
        )
