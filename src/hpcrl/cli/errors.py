"""How commands end when something hpcrl refuses: one line on stderr and the error's exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import typer

from hpcrl.errors import HpcrlError

__all__ = ["report_errors"]

P = ParamSpec("P")
R = TypeVar("R")


def report_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Turn an HpcrlError into one line and an exit code. Goes below ``@app.command()``."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except HpcrlError as error:
            print(f"hpcrl: {error}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from error

    return wrapped
