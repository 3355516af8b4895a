"""``hpcrl workers``: more sandbox nodes for a run that is going on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcrl.cli.errors import report_errors, run_at

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _workers() -> None:
    """More sandbox nodes for a run that is going on."""


@app.command()
@report_errors
def add(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run that is going on.")],
    nodes: Annotated[int, typer.Option(help="Nodes to add.")] = 1,
    partition: Annotated[
        str | None, typer.Option(metavar="NAME", help="Where; default: as in slurm/workers.sh.")
    ] = None,
    array: Annotated[
        bool, typer.Option("--array", help="One job per node, so that each comes and goes alone.")
    ] = False,
    sbatch: Annotated[
        str | None, typer.Option(metavar="OPTIONS", help="More options of sbatch: '--qos=low --time=2:00:00'.")
    ] = None,
) -> None:
    """Submit workers that join the run. They may be preempted at any time without loss, and leave when the run ends."""
    from hpcrl.launch.submit import job_output
    from hpcrl.launch.workers import add_workers

    run = run_at(run_dir)
    job = add_workers(run.root, nodes, partition, array=array, sbatch=(sbatch or "").split())
    print(f"submitted job {job}; its output: {job_output(job)}; end it at any time: scancel {job}")
    print(f"logs: {run.logs('worker')}/joined-*.log")
