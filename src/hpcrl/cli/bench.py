"""``hpcrl bench NAME``: measurements of hpcrl's own parts, against a bound or a peer taken in the same run.

``weights``, ``proxy``, ``sandbox`` and ``life`` have options of their own; the others are one line each in ``BENCHES``: a module with
``measure(quick, say) -> numbers``.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from typing import Annotated

import typer

from hpcrl.cli.bench_weights import weights
from hpcrl.cli.errors import report_errors
from hpcrl.errors import UserError

__all__ = ["BENCHES", "app"]

BENCHES = {
    "coordinator": (
        "hpcrl.bench.coordinator",
        "Rollouts per second through the coordinator, its memory and its restart.",
    ),
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
        _show(importlib.import_module(module).measure(quick, _say), as_json)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(numbers: Mapping[str, float | None], as_json: bool) -> None:
    if as_json:
        print(json.dumps(numbers))
        return
    for key, value in numbers.items():
        print(f"{key:32} {'–' if value is None else f'{value:,.3f}'}")


@app.command(help="Model calls through the recording proxy, against the same calls straight to vLLM.")
@report_errors
def proxy(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line on stdout.")] = False,
    quick: Annotated[bool, typer.Option(help="Small and short: shows that it works, measures nothing.")] = False,
    only: Annotated[str | None, typer.Option(help="One part: calls, streams, dialogues, memory.")] = None,
) -> None:
    from hpcrl.bench.proxy import PARTS, measure

    if only is not None and only not in PARTS:
        raise UserError(f"--only {only}: the parts are {', '.join(PARTS)}")
    _show(measure(quick, _say, only), as_json)


@app.command(help="Sandboxes and scoring, against plain `apptainer exec` of the same image with the same options.")
@report_errors
def sandbox(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line on stdout.")] = False,
    quick: Annotated[bool, typer.Option(help="Small and short: shows that it works, measures nothing.")] = False,
    only: Annotated[
        str | None, typer.Option(help="One part: start, pool, commands, files, scoring, crowd, row.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=8, help="Attempts of the row; 2,000 unless --quick.")] = None,
    image: Annotated[str, typer.Option(help="As `sandbox.image` of a run.")] = "containers/sandbox.def",
    table: Annotated[bool, typer.Option(help="Asked and measured, as a Markdown table.")] = False,
) -> None:
    from hpcrl.bench.sandbox import PARTS, markdown, measure

    if only is not None and only not in PARTS:
        raise UserError(f"--only {only}: the parts are {', '.join(PARTS)}")
    numbers = measure(quick, _say, only, rounds, image)
    if table:
        print("\n".join(markdown(numbers)), file=sys.stderr if as_json else sys.stdout)
    if as_json or not table:
        _show(numbers, as_json)


@app.command(help="What a run does when its parts die, on a development cluster (root needed).")
@report_errors
def life(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line on stdout.")] = False,
    only: Annotated[
        str | None, typer.Option(help="One part: rank, worker, coordinator, requeue, scancel, doctor, planted.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each part.")] = 3,
    name: Annotated[str, typer.Option(help="Name of the development cluster that is started for it.")] = "hpcrl-life",
) -> None:
    from hpcrl.bench.life import PARTS, measure

    if only is not None and only not in PARTS:
        raise UserError(f"--only {only}: the parts are {', '.join(PARTS)}")
    _show(measure(_say, only, rounds, name), as_json)


for _name, (_module, _text) in BENCHES.items():
    _add(_name, _module, _text)
