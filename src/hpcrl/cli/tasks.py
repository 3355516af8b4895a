"""``hpcrl tasks``: look at Harbor task directories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcrl.cli.errors import report_errors
from hpcrl.errors import EnvironmentFault, UserError

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Check task directories."""


@app.command()
@report_errors
def check(folder: Annotated[Path, typer.Argument(help="A task directory, or a directory of them.")]) -> None:
    """Read every task: malformed files, misspelt keys, images that are not there; each is named. Nothing is built or pulled."""
    from hpcrl.sandbox.tasks import list_tasks

    if (folder / "task.toml").exists():
        paths = [folder]
    else:
        list_tasks(folder)  # at least one; a run reads every sub-directory, so each must be a task
        paths = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    notes: dict[str, None] = {}
    problems = [problem for path in paths for problem in _problems(path, notes)]
    for note in notes:
        print(f"note: {note}")
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        print("\n".join(problems))
        raise UserError(f"{len(problems)} problems in the {len(paths)} tasks of {folder}")
    print(f"{len(paths)} tasks in {folder} are well-formed")


def _problems(path: Path, notes: dict[str, None]) -> list[str]:
    """One line each. What a run will do by itself goes to ``notes``."""
    from hpcrl.sandbox.images import resolve
    from hpcrl.sandbox.task_keys import misspelt
    from hpcrl.sandbox.tasks import read_toml
    from hpcrl.scoring.private import load_private

    where = path / "task.toml"
    try:
        task = load_private(path).public
    except UserError as error:
        return [str(error)]
    found = [f"{where}: {line}" for line in misspelt(read_toml(where))]
    if task.image is not None:
        try:
            resolve(task.image, task.directory, build=False)
        except UserError as error:
            found.append(f"{where}: {error}")
        except EnvironmentFault as error:
            notes[str(error)] = None
    return found
