"""How commands end when something hpcrl refuses: one line on stderr and the error's exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import typer

from hpcrl.errors import EnvironmentFault, HpcrlError, UserError
from hpcrl.protocol.rundir import RunDir

__all__ = ["new_file", "report_errors", "run_at"]

P = ParamSpec("P")
R = TypeVar("R")


def report_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Turn an HpcrlError, or what the file system refuses, into one line and an exit code. Goes below ``@app.command()``."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except HpcrlError as error:
            print(f"hpcrl: {error}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from error
        except BrokenPipeError as error:
            # The reader has seen enough (`| head`). Python's own flush at exit must not complain either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from error
        except OSError as error:
            print(f"hpcrl: {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}", file=sys.stderr)
            raise typer.Exit(EnvironmentFault.exit_code) from error

    return wrapped


def run_at(place: Path) -> RunDir:
    """The run in a directory. Raises UserError for anything else."""
    run = RunDir(place)
    if run.root.exists() and not run.root.is_dir():
        raise UserError(f"{run.root} is a file; give the run directory, such as runs/RUN_ID")
    if not run.config.exists():
        raise UserError(
            f"{run.root} holds no run (config.resolved.yaml is missing); a submitted run writes it when its job starts"
        )
    return run


def new_file(path: Path, force: bool) -> Path:
    """``path`` if a file may be written there. Raises UserError for a directory, and for an existing file without ``force``."""
    if path.is_dir():
        raise UserError(f"{path} is a directory; name the file to write in it")
    if path.exists() and not force:
        raise UserError(f"{path} exists; choose another name, or replace it with --force")
    return path
