"""``hpcrl tasks``: Harbor task directories: check, run, convert."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.errors import report_errors
from hpcrl.cli.plain import plain
from hpcrl.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcrl.run.task_check import CheckedTask
    from hpcrl.run.trials import Trial
    from hpcrl.sandbox.limits import Limits

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)

_CORES = os.cpu_count() or 1

_MANY = 40
"""More tasks than this: the table shows only those with problems."""

_LINE_S = 15.0

Places = Annotated[list[Path], typer.Argument(metavar="DIR…", help="Task directories, or directories that hold them.")]
Config = Annotated[Path | None, typer.Option(help="Take sandbox image and limits from this configuration.")]
Jobs = Annotated[int, typer.Option(min=1, help="Attempts at once.")]
AsJson = Annotated[bool, typer.Option("--json", help="The table as JSON.")]


@app.callback()
def _group() -> None:
    """Check, run and convert tasks in Harbor format."""


@app.command()
@report_errors
def check(
    places: Places,
    quick: Annotated[bool, typer.Option("--quick", help="Only read the files: build and run nothing.")] = False,
    config: Config = None,
    jobs: Jobs = _CORES,
    as_json: AsJson = False,
) -> None:
    """Are these tasks fit to train on? Files, image, the solution scores 1, doing nothing less, and both the same twice."""
    from hpcrl.run.task_check import find_tasks, read_task, run_checks

    tasks = [read_task(path) for path in find_tasks(places)]
    if not quick and not all(task.problems for task in tasks):
        image, limits = _surroundings(config)
        with _progress(sum(not task.problems for task in tasks) * 4) as done:
            _in_pool(lambda pool: run_checks(tasks, image, limits, pool, jobs, done))
    if as_json:
        print(json.dumps([_as_dict(task) for task in tasks]))
    else:
        _show(tasks, quick)
    bad = sum(bool(task.problems) for task in tasks)
    if bad:
        raise UserError(f"{bad} of {len(tasks)} tasks have problems")


@app.command()
@report_errors
def run(
    places: Places,
    agent: Annotated[str, typer.Option(help="oracle, nothing, or command:PROGRAM (as harness.kind: command).")],
    endpoint: Annotated[str, typer.Option(help="For command: the OPENAI_BASE_URL it is given.")] = "",
    key_variable: Annotated[
        str, typer.Option(help="For command: variable that holds the endpoint's key.")
    ] = "OPENAI_API_KEY",
    config: Config = None,
    jobs: Jobs = _CORES,
    as_json: AsJson = False,
) -> None:
    """One attempt at each task, scored as in a run. Exit code 1 when one got no score."""
    from hpcrl.errors import RunError
    from hpcrl.run.task_check import find_tasks
    from hpcrl.run.trials import images_with, parse_agent, try_tasks
    from hpcrl.scoring.private import load_private

    who = parse_agent(agent, endpoint, os.environ.get(key_variable, ""))
    tasks = [load_private(path) for path in find_tasks(places)]
    image, limits = _surroundings(config)

    with _progress(len(tasks)) as done:
        trials = _in_pool(
            lambda pool: try_tasks([(task, who) for task in tasks], images_with(image), limits, pool, jobs, done)
        )
    if as_json:
        print(json.dumps([asdict(trial) for trial in trials]))
    else:
        _show_trials(trials)
    unscored = sum(trial.reward is None for trial in trials)
    if unscored:
        raise RunError(f"{unscored} of {len(trials)} attempts got no score")


@app.command()
@report_errors
def convert(
    kind: Annotated[str, typer.Argument(help="Format of the file: swebench.")],
    file: Annotated[Path, typer.Argument(help="Instances: JSON (one, or a list) or JSON lines.")],
    out: Annotated[Path, typer.Option(help="New directory for the tasks.")],
    image: Annotated[
        str | None,
        typer.Option(help="Image of the tasks; {instance_id} and {repo} are filled in. Default: the benchmark's own."),
    ] = None,
) -> None:
    """Write instances of a benchmark as Harbor tasks, one directory each."""
    from hpcrl.scoring.swebench import convert_file

    if kind != "swebench":
        raise UserError(f"{kind}: only swebench can be converted")
    written = convert_file(file, out, image)
    print(f"{len(written)} tasks in {out}; look at them with: hpcrl tasks check {out}")


def _surroundings(config: Path | None) -> tuple[str, Limits]:
    """(image of tasks that name none, limits)."""
    from hpcrl.config import load_config
    from hpcrl.config.sections import SandboxSection
    from hpcrl.run.sandboxes import limits_of
    from hpcrl.sandbox.limits import Limits

    if config is None:
        return SandboxSection().image, Limits()
    loaded = load_config(config, [])
    return loaded.sandbox.image, limits_of(loaded)


def _in_pool(work: Callable) -> list:  # type: ignore[type-arg]
    import asyncio

    from hpcrl.sandbox.pool import SandboxPool

    async def main() -> list:  # type: ignore[type-arg]
        async with SandboxPool(backend="apptainer", start_concurrency=os.cpu_count() or 1) as pool:
            return await work(pool)

    return asyncio.run(main())


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Trial], None]]:
    """A bar on a terminal, now and then a line elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    began = told = time.monotonic()
    count = 0

    def line(_trial: Trial) -> None:
        nonlocal count, told
        count += 1
        now = time.monotonic()
        if now - told >= _LINE_S:
            told = now
            left = (now - began) / count * (total - count)
            console.print(f"{count} of {total} attempts, about {left:.0f} s left", highlight=False)

    if not console.is_terminal:
        yield line
        return
    with Progress(console=console, transient=True) as bar:
        row = bar.add_task("attempts", total=total)
        yield lambda _trial: bar.advance(row)


def _as_dict(task: CheckedTask) -> dict[str, object]:
    return {
        "task": task.path.name,
        "path": str(task.path),
        "ok": not task.problems,
        "oracle": task.oracle,
        "nothing": task.nothing,
        "problems": task.problems,
        "notes": task.notes,
    }


def _show(tasks: list[CheckedTask], quick: bool) -> None:
    shown = [task for task in tasks if task.problems] if len(tasks) > _MANY else tasks
    if shown and not quick:
        _table(
            ("task", "solution", "doing nothing", ""),
            [
                (task.path.name, _rewards(task.oracle), _rewards(task.nothing), "BAD" if task.problems else "ok")
                for task in shown
            ],
        )
    notes: dict[str, list[str]] = {}
    for task in tasks:
        for note in task.notes:
            notes.setdefault(note, []).append(task.path.name)
    for note, names in notes.items():
        print(f"note: {note} ({names[0]}{f' and {len(names) - 1} others' if len(names) > 1 else ''})")
    for task in tasks:
        for problem in task.problems:
            print(problem if str(task.path) in problem else f"{task.path}: {problem}")
    good = sum(not task.problems for task in tasks)
    print(f"{good} of {len(tasks)} tasks are {'well-formed' if quick else 'fit'}")


def _show_trials(trials: list[Trial]) -> None:
    _table(
        ("task", "reward", "s", "failure", "detail"),
        [
            (
                trial.task_id,
                "" if trial.reward is None else f"{trial.reward:g}",
                f"{trial.seconds:.1f}",
                plain(trial.failure or ""),
                plain(trial.detail[-120:]),
            )
            for trial in trials
        ],
    )
    scored = [trial.reward for trial in trials if trial.reward is not None]
    if scored:
        print(f"mean reward {sum(scored) / len(scored):.3f} over {len(scored)} of {len(trials)} tasks")


def _rewards(rewards: list[float | None]) -> str:
    return " ".join("–" if reward is None else f"{reward:g}" for reward in rewards)


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        table.add_row(*map(escape, row))
    Console(width=None if Console().is_terminal else 200).print(table)
