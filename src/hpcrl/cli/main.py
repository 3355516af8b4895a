"""The ``hpcrl`` command. Heavy imports stay inside the functions, so that ``--help`` answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli import bench, database, devcluster, images, shards, tasks, workers
from hpcrl.cli.errors import new_file, report_errors, run_at
from hpcrl.errors import EnvironmentFault, UserError

if TYPE_CHECKING:
    from hpcrl.launch.runs import Submission

__all__ = ["app", "main"]

app = typer.Typer(
    help="Agentic RL training of language models in one Slurm heterogeneous job.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(devcluster.app, name="devcluster", help="A real multi-node Slurm on this one machine.")
app.add_typer(shards.app, name="shards", help="Look into trajectory shards.")
app.add_typer(bench.app, name="bench", help="Measure hpcrl's own parts.")
app.add_typer(database.app, name="db", help="Check a run's database.")
app.add_typer(tasks.app, name="tasks", help="Check, run and convert tasks.")
app.add_typer(images.app, name="images", help="The sandbox images of this machine.")
app.add_typer(workers.app, name="workers", help="More sandbox nodes for a run that is going on.")

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
        from hpcrl.launch.runs import prepare

        job = _send(prepare(config, overrides or [], run_dir=root, resume=resume))
        follow(RunDir(root), lost_job(job), old_end)
        return
    follow_while(RunDir(root), lambda: launch_local(root, loaded, resume=resume is not None))


@app.command("submit")
@report_errors
def submit_command(
    config: Annotated[Path, typer.Argument(help="Run configuration (YAML).")],
    overrides: Overrides = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run directory; default: a fresh one under run.dir.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, print what sbatch would get, submit nothing.")
    ] = False,
    after: Annotated[
        str | None, typer.Option(metavar="JOB", help="Start when this job has ended, however it ended.")
    ] = None,
    sbatch: Annotated[
        str | None,
        typer.Option(metavar="OPTIONS", help="More options of sbatch, : between components: '--nodes=2 : --nodes=4'."),
    ] = None,
) -> None:
    """Check the configuration here, then submit it with sbatch. Prints the job id and the run directory."""
    from hpcrl.launch.runs import prepare

    ready = prepare(config, overrides or [], run_dir=run_dir, after=after, sbatch=(sbatch or "").split())
    if dry_run:
        print(ready.text, end="")
        return
    _send(ready)
    print(f"run directory: {ready.root}\nfollow it with: hpcrl status {ready.root} --follow")


def _send(ready: Submission) -> str:
    from hpcrl.launch.runs import send
    from hpcrl.launch.slurm import Slurm
    from hpcrl.launch.submit import job_output

    job = send(ready, Slurm()).job_id
    print(f"submitted job {job}; its output: {job_output(job)}", flush=True)
    return job


@app.command("status")
@report_errors
def status_command(
    place: Annotated[str, typer.Argument(metavar="RUN_DIR|rollout", help="A run directory, or the word `rollout`.")],
    rollout: Annotated[str | None, typer.Argument(metavar="[ID]", help="After `rollout`: its id.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show progress until the run ends.")] = False,
    run_dir: Annotated[
        Path | None, typer.Option(help="For `rollout`: the run directory; default: the newest one under runs/.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Everything the coordinator says, or how the run ended, as JSON.")
    ] = False,
) -> None:
    """Where a run stands and who waits for whom; or the life of one rollout: `hpcrl status rollout g000012-r3`."""
    from hpcrl.cli.follow import follow as follow_run
    from hpcrl.cli.follow import show
    from hpcrl.cli.history import newest_run, show_history
    from hpcrl.protocol.rundir import RunDir

    if place == "rollout":
        if rollout is None:
            raise UserError("which rollout? hpcrl status rollout g000012-r3 [--run-dir RUN_DIR]")
        show_history(run_at(run_dir) if run_dir is not None else newest_run(), rollout, as_json)
        return
    if rollout is not None or run_dir is not None:
        raise UserError(
            f"hpcrl status {place} takes nothing more; for one rollout: hpcrl status rollout ID --run-dir RUN_DIR"
        )
    if follow and as_json:
        raise UserError("--follow and --json exclude each other: --json is one snapshot")
    if follow and not Path(place).exists():
        follow_run(RunDir(Path(place)))  # a submitted run makes its directory when it starts
    elif follow:
        follow_run(run_at(Path(place)))
    else:
        show(run_at(Path(place)), as_json)


@app.command("report")
@report_errors
def report_command(run_dir: Annotated[Path, typer.Argument(help="Run directory.")]) -> None:
    """Write summary.json and report.html again from a run's files."""
    from hpcrl.report import write_report

    run = run_at(run_dir)
    write_report(run.root)
    print(f"{run.summary}\n{run.report}")


@app.command("score")
@report_errors
def score_command(
    run_dir: Annotated[Path, typer.Argument(help="Run directory of a run that is not being served.")],
    verifier: Annotated[
        Path, typer.Option(metavar="DIR", help="Tasks (or one) with the new tests, under the old names.")
    ],
    jobs: Annotated[int, typer.Option(min=1, help="Attempts at once.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="The counts as JSON.")] = False,
) -> None:
    """Score a run's stored artifacts again with other tests; results go beside the old ones. Called again, it goes on."""
    from hpcrl.cli.score import score_again

    score_again(run_dir, verifier, jobs, as_json)


@app.command("compare")
@report_errors
def compare_command(
    out: Annotated[Path, typer.Argument(help="SVG file to write.")],
    sets: Annotated[list[str], typer.Argument(metavar="LABEL=RUN_DIR,RUN_DIR…", help="Named sets of runs.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the file if there is one.")] = False,
) -> None:
    """Learning curves of several runs in one picture, and their numbers as a Markdown table."""
    from hpcrl.protocol.rundir import publish_text
    from hpcrl.report.compare import compare_svg, compare_table

    if out.suffix != ".svg":
        raise UserError(
            f"{out}: the first argument is the picture to write, a name ending in .svg; then LABEL=RUN_DIR,RUN_DIR…"
        )
    new_file(out, force)
    named: dict[str, list[Path]] = {}
    for item in sets:
        label, equals, paths = item.partition("=")
        if not (label and equals and all(paths.split(","))):
            raise UserError(f"{item!r}: expected LABEL=RUN_DIR,RUN_DIR…")
        if label in named:
            raise UserError(f"{label} is given twice; put all its runs behind one {label}=, separated by commas")
        named[label] = [run_at(Path(path)).root for path in paths.split(",")]
    publish_text(out, compare_svg(named))
    print(compare_table(named))


@app.command("doctor")
@report_errors
def doctor_command(
    config: Annotated[Path | None, typer.Argument(help="Also check this configuration's model and tasks.")] = None,
    partitions: Annotated[
        list[str] | None,
        typer.Option("--partition", metavar="NAME", help="Once for each: trainer's, inference's, sandboxes'."),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Try so many nodes of each partition in one short job.")] = 2,
    job: Annotated[bool, typer.Option("--job/--no-job", help="Whether to submit that job.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="The table as JSON.")] = False,
) -> None:
    """What works on this machine: Slurm, MPI, sandboxes, vLLM, disk. Exit code 3 when something a run needs is broken."""
    from hpcrl.cli.doctor import doctor

    if not doctor(config, partitions, as_json, nodes, job):
        raise EnvironmentFault("something is broken; see the table")


def main() -> None:
    """Entry point of the console script."""
    app()
