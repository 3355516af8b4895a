"""``hpcrl db check``: whether a run's database holds what it must. The coordinator of the run must not be running."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcrl.cli.errors import report_errors, run_at
from hpcrl.errors import RunError

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)


@app.callback()
def group() -> None:
    """Keeps ``check`` a subcommand while it is the only one."""


@app.command()
@report_errors
def check(run_dir: Annotated[Path, typer.Argument(help="A run directory.")]) -> None:
    """Read coordinator.db whole: file damage, illegal histories, double consumption, counters. Exit code 1 when something is wrong."""
    from sqlite3 import DatabaseError

    from hpcrl.coordinator.check import RULES, check_database
    from hpcrl.coordinator.database import open_for_reading

    path = run_at(run_dir).database
    connection = open_for_reading(path)
    try:
        problems = check_database(connection)
        for line in problems:
            print(line)
        [rollouts] = connection.execute("SELECT count(*) FROM rollouts").fetchone()
    except DatabaseError as error:
        raise RunError(f"{path} is damaged: {error}") from error
    finally:
        connection.close()
    print(f"{path}: {rollouts} rollouts, {len(RULES)} rules, {len(problems)} broken")
    if problems:
        raise RunError(f"{path} breaks {len(problems)} rules")
