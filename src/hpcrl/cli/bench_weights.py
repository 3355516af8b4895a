"""``hpcrl bench weights``: publishing a model against plain MPI, gloo and files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hpcrl.cli.errors import report_errors

__all__ = ["weights"]


@report_errors
def weights(
    size: Annotated[str, typer.Option(help="Bytes of the model's weights, for example 256MiB.")] = "256MiB",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    receivers: Annotated[int, typer.Option(help="Inference nodes; the first one serves an engine.")] = 1,
    senders: Annotated[int, typer.Option(help="Trainer ranks, one per node; they share the bytes (DDP).")] = 1,
    link: Annotated[str, typer.Option(help="Rate of every node's link for tc (1gbit, 100mbit), or none.")] = "none",
    algo: Annotated[str, typer.Option(help="auto, star or chain.")] = "auto",
    repeat: Annotated[int, typer.Option(help="Counted rounds, after one to warm up.")] = 5,
    model: Annotated[Path | None, typer.Option(help="Publish this model directory instead of one of --size.")] = None,
    engine: Annotated[bool, typer.Option(help="Serve, stream and flip; without it only the way of the bytes.")] = True,
    threads: Annotated[int, typer.Option(help="Threads of the engine.")] = 1,
    baselines: Annotated[bool, typer.Option(help="gloo's broadcast and file + reload as well.")] = True,
    name: Annotated[str, typer.Option(help="Name of the development cluster that is started for it.")] = "hpcrl-bench",
    table: Annotated[
        bool, typer.Option(help="All targets, asked and measured: 15 minutes; --model is SmolLM2's.")
    ] = False,
    only: Annotated[list[str] | None, typer.Option(help="With --table: only this run; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line on stdout.")] = False,
) -> None:
    """Publishing weights: raw MPI, our publish and flip, gloo's broadcast, file and reload, on the same ranks. Needs root."""
    from hpcrl.bench.model import parse_size
    from hpcrl.bench.weights import WeightsBench

    if table:
        _table(only, repeat, name, model, as_json)
        return
    bench = WeightsBench(
        nbytes=parse_size(size),
        dtype=dtype,
        senders=senders,
        receivers=receivers,
        link=link,
        algorithm=algo,
        repeats=repeat,
        cluster=name,
        model=model,
        engine=engine,
        threads=threads,
        baselines=baselines,
    )
    result = bench.run(_say)
    if as_json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:<18} {value}")


def _table(only: list[str] | None, repeat: int, name: str, model: Path | None, as_json: bool) -> None:
    from hpcrl.bench.weights_table import RUNS, markdown, run_all
    from hpcrl.errors import UserError

    unknown = sorted(set(only or ()) - RUNS.keys())
    if unknown:
        raise UserError(f"--only {unknown[0]}: allowed are {', '.join(map(repr, RUNS))}")
    results = run_all(only or list(RUNS), repeats=repeat, cluster=name, model=model, progress=_say)
    print(json.dumps(results) if as_json else "\n".join(markdown(results)))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
