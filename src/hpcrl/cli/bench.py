"""``hpcrl bench NAME``: measurements of hpcrl's own parts."""

from __future__ import annotations

import typer

from hpcrl.cli.bench_weights import weights

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)
app.command("weights")(weights)


@app.callback()
def _named() -> None:
    """Measure hpcrl's own parts against a bound or a peer taken in the same run."""
