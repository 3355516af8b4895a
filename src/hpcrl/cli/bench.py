"""``hpcrl bench NAME``: measurements of hpcrl's own parts, against a bound or a peer taken in the same run.

``weights`` has options of its own; the others are one line each in ``BENCHES``: a module with ``measure(quick, say) -> numbers``.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Annotated

import typer

from hpcrl.cli.bench_weights import weights
from hpcrl.cli.errors import report_errors

__all__ = ["BENCHES", "app"]

BENCHES = {
    "coordinator": (
        "hpcrl.bench.coordinator",
        "Rollouts per second through the coordinator, its memory and its restart.",
    ),
    "proxy": ("hpcrl.bench.proxy", "Model calls through the recording proxy, against the same calls straight to vLLM."),
    "trajectory": ("hpcrl.bench.trajectory", "Writing and reading shards, against raw h5py and JSON Lines."),
}
"""Name → module, help."""

app = typer.Typer(no_args_is_help=True)
app.command("weights")(weights)


def _add(name: str, module: str, text: str) -> None:
    @app.command(name, help=text)
    @report_errors
    def command(
        as_json: Annotated[bool, typer.Option("--json", help="One JSON line on stdout.")] = False,
        quick: Annotated[bool, typer.Option(help="Small and short: shows that it works, measures nothing.")] = False,
    ) -> None:
        numbers = importlib.import_module(module).measure(quick, lambda text: print(text, file=sys.stderr, flush=True))
        if as_json:
            print(json.dumps(numbers))
            return
        for key, value in numbers.items():
            print(f"{key:32} {'–' if value is None else f'{value:,.3f}'}")


for _name, (_module, _text) in BENCHES.items():
    _add(_name, _module, _text)
