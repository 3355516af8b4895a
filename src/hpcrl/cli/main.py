"""The ``hpcrl`` command. Heavy imports stay inside the functions, so that ``--help`` answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcrl.cli import bench, devcluster, shards, tasks
from hpcrl.cli.errors import report_errors
from hpcrl.errors import EnvironmentFault, UserError

__all__ = ["app", "main"]

app = typer.Typer(
    help="Agentic RL training of language models in one Slurm heterogeneous job.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(devcluster.app, name="devcluster", help="A real multi-node Slurm on this one machine.")
app.add_typer(bench.app, name="bench", help="Measure hpcrl's own parts.")
app.add_typer(shards.app, name="shards", help="Look into trajectory shards.")
app.add_typer(tasks.app, name="tasks", help="Check task directories.")

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a configuration key.")
]


@app.command("run")
@report_errors
def run_command(
    config: Annotated[Path | None, typer.Argument(help="Run configuration (YAML).")] = None,
    overrides: Overrides = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run directory; default: a fresh one under run.dir.")] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="Continue this run from its last checkpoint.")
    ] = None,
    launcher: Annotated[
        str, typer.Option(help="local: mpiexec and subprocesses on this machine; slurm: submit and follow.")
    ] = "local",
) -> None:
    """Run a configuration on this machine (local), or submit it and follow it (slurm)."""
    from hpcrl.cli.follow import follow, follow_while, lost_job, read_end
    from hpcrl.config import load_config
    from hpcrl.launch.job import launch_local, new_run_dir
    from hpcrl.launch.preflight import check_resumable
    from hpcrl.protocol.rundir import RunDir

    if (config is None) == (resume is None):
        raise UserError("give either a configuration or --resume RUN_DIR")
    if launcher not in ("local", "slurm"):
        raise UserError(f"--launcher {launcher}: allowed are local and slurm")
    if resume is not None:
        check_resumable(resume)
    loaded = load_config(config or RunDir(resume or Path()).config, overrides)
    root = (resume or run_dir or new_run_dir(loaded)).resolve()
    print(f"run directory: {root}", flush=True)
    if launcher == "slurm":
        old_end = read_end(RunDir(root))
        job = _submit(config, resume, overrides or [], root)
        follow(RunDir(root), lost_job(job), old_end)
        return
    follow_while(RunDir(root), lambda: launch_local(root, loaded, resume=resume is not None))


@app.command("submit")
@report_errors
def submit_command(
    config: Annotated[Path, typer.Argument(help="Run configuration (YAML).")],
    overrides: Overrides = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run directory; default: a fresh one under run.dir.")] = None,
) -> None:
    """Check the configuration here, then submit it with sbatch. Prints the job id and the run directory."""
    from hpcrl.config import load_config
    from hpcrl.launch.job import new_run_dir

    loaded = load_config(config, overrides)
    root = (run_dir or new_run_dir(loaded)).resolve()
    job = _submit(config, None, overrides or [], root)
    print(f"job {job}\nrun directory: {root}\nfollow it with: hpcrl status {root} --follow")


def _submit(config: Path | None, resume: Path | None, overrides: list[str], root: Path) -> str:
    from hpcrl.config import load_config
    from hpcrl.launch.preflight import check_fresh, check_inputs
    from hpcrl.launch.submit import submit
    from hpcrl.protocol.rundir import RunDir

    check_inputs(load_config(config or RunDir(resume or Path()).config, overrides))
    if resume is None:
        check_fresh(root)
    target = ["--resume", str(resume)] if resume else [str(config), "--run-dir", str(root)]
    job = submit([*target, *(part for item in overrides for part in ("--set", item))])
    print(f"submitted job {job}", flush=True)
    return job


@app.command("status")
@report_errors
def status_command(
    run_dir: Annotated[Path, typer.Argument(help="Run directory.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show progress until the run ends.")] = False,
) -> None:
    """Where a run stands."""
    from hpcrl.cli.follow import follow as follow_run
    from hpcrl.cli.follow import show
    from hpcrl.protocol.rundir import RunDir

    run = RunDir(run_dir)
    if not run.config.exists() and not follow:
        raise UserError(f"{run.root} holds no run (config.resolved.yaml is missing)")
    if follow:
        follow_run(run)
    else:
        show(run)


@app.command("report")
@report_errors
def report_command(run_dir: Annotated[Path, typer.Argument(help="Run directory.")]) -> None:
    """Write summary.json and report.html again from a run's files."""
    from hpcrl.protocol.rundir import RunDir
    from hpcrl.report import write_report

    run = RunDir(run_dir)
    if not run.config.exists():
        raise UserError(f"{run.root} holds no run (config.resolved.yaml is missing)")
    write_report(run.root)
    print(f"{run.summary}\n{run.report}")


@app.command("compare")
@report_errors
def compare_command(
    out: Annotated[Path, typer.Argument(help="SVG file to write.")],
    sets: Annotated[list[str], typer.Argument(metavar="LABEL=RUN_DIR,RUN_DIR…", help="Named sets of runs.")],
) -> None:
    """Learning curves of several runs in one picture, and their numbers as a Markdown table."""
    from hpcrl.protocol.rundir import publish_text
    from hpcrl.report.compare import compare_svg, compare_table

    named = {}
    for item in sets:
        label, equals, paths = item.partition("=")
        if not (label and equals and paths):
            raise UserError(f"{item!r}: expected LABEL=RUN_DIR,RUN_DIR…")
        named[label] = [Path(path) for path in paths.split(",")]
    publish_text(out, compare_svg(named))
    print(compare_table(named))


@app.command("doctor")
@report_errors
def doctor_command(
    config: Annotated[Path | None, typer.Argument(help="Also check this configuration's model and tasks.")] = None,
) -> None:
    """What works on this machine: Slurm, MPI, sandboxes, vLLM, disk. Exit code 3 when something a run needs is broken."""
    from hpcrl.cli.doctor import doctor

    if not doctor(config):
        raise EnvironmentFault("something is broken; see the table")


def main() -> None:
    """Entry point of the console script."""
    app()
