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
    name: Annotated[str, typer.Option(help="Name of the development cluster that is started for it.")] = "hpcrl-bench",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line on stdout.")] = False,
) -> None:
    """Publishing weights: raw MPI, our publish and flip, gloo's broadcast, file and reload, on the same ranks. Needs root."""
    from hpcrl.bench.model import parse_size
    from hpcrl.bench.weights import WeightsBench

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
    )
    result = bench.run(lambda line: print(line, file=sys.stderr, flush=True))
    if as_json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:<18} {value}")
