"""``hpcrl devcluster``: a real multi-node Slurm on one machine, for trying and testing. Needs root."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from hpcrl.cli.errors import report_errors

__all__ = ["app"]

app = typer.Typer(
    help="A real multi-node Slurm cluster on one machine (root needed).",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Name = Annotated[str, typer.Option("--name", help="Cluster name; clusters of different names run side by side.")]


@app.command()
@report_errors
def up(
    layout: Annotated[Path | None, typer.Option("--layout", help="YAML file; default: 5 nodes, 3 partitions.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Cluster name; default: the layout's, 'hpcrl'.")] = None,
) -> None:
    """Start the cluster, or repair it if it exists."""
    from hpcrl.devcluster import Cluster, load_layout

    wanted = load_layout(layout, name=name)
    start = time.monotonic()
    cluster = Cluster(wanted.name)
    existed = cluster.status().exists
    cluster.up(wanted if layout is not None else None, progress=typer.echo)
    verb = "runs" if existed else "is up"
    typer.echo(f"cluster {wanted.name} {verb} ({time.monotonic() - start:.1f} s); reach it with:")
    for key, value in cluster.env().items():
        typer.echo(f"  export {key}={shlex.quote(value)}")


@app.command()
@report_errors
def status(name: Name = "hpcrl") -> None:
    """Show daemons and nodes. Exit code 1 unless everything is up."""
    from hpcrl.devcluster import Cluster

    now = Cluster(name).status()
    if not now.exists:
        typer.echo(f"cluster {name}: none")
        raise typer.Exit(1)
    parts = {"munged": now.munged, "slurmctld": now.slurmctld}
    daemons = ", ".join(f"{part} {'up' if alive else 'DOWN'}" for part, alive in parts.items())
    typer.echo(f"cluster {name}: {daemons}, {now.jobs} job(s), {now.directory}")
    for node in now.nodes:
        slurmd = "up" if node.slurmd else "DOWN"
        typer.echo(
            f"  {node.name:<12} {node.address:<15} {node.partition:<10} {node.cpus} CPUs {node.gpus} GPUs"
            f"  slurmd {slurmd:<4} {node.state}"
        )
    if not now.healthy:
        raise typer.Exit(1)


@app.command()
@report_errors
def down(name: Name = "hpcrl") -> None:
    """Cancel all jobs and remove the cluster without a trace."""
    from hpcrl.devcluster import Cluster

    if Cluster(name).down(progress=typer.echo):
        typer.echo(f"cluster {name} is down")
    else:
        typer.echo(f"cluster {name}: none")


@app.command("exec", context_settings={"ignore_unknown_options": True})
@report_errors
def exec_(
    command: Annotated[list[str], typer.Argument(help="Command and its arguments, after --.", metavar="-- CMD...")],
    name: Name = "hpcrl",
    node: Annotated[str | None, typer.Option("--node", help="Run inside this node, not on the machine.")] = None,
) -> None:
    """Run a command against the cluster (srun, sbatch, ...), or inside one of its nodes."""
    from hpcrl.devcluster import Cluster

    raise typer.Exit(Cluster(name).run(command, node=node))


@app.command()
@report_errors
def env(name: Name = "hpcrl") -> None:
    """Print lines for the shell: eval "$(hpcrl devcluster env)". What was set for another Slurm is unset."""
    from hpcrl.devcluster import Cluster

    cluster = Cluster(name)
    for key in sorted(cluster.foreign()):
        typer.echo(f"unset {key}")
    for key, value in cluster.env().items():
        typer.echo(f"export {key}={shlex.quote(value)}")
