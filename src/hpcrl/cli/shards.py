"""``hpcrl shards ls|show|verify|export``: look into sealed trajectory shards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from sqlite3 import DatabaseError
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcrl.cli.errors import new_file, report_errors
from hpcrl.cli.plain import plain
from hpcrl.config import load_config
from hpcrl.errors import DataError, HpcrlError, RunError, UserError
from hpcrl.protocol.rundir import RunDir, publish_text
from hpcrl.report.tokens import LEGEND, Heading, cells, colour, render_page
from hpcrl.trajectory.names import QUARANTINE
from hpcrl.trajectory.reader import ShardReader
from hpcrl.trajectory.schema import Trajectory

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True)

Place = Annotated[Path, typer.Argument(help="A run directory, a folder of shards, or one shard.")]


@app.command("ls")
@report_errors
def list_shards(place: Place) -> None:
    """One line per trajectory. Damaged shards are left out, and the exit code is 1."""
    damaged: list[DataError] = []
    table = Table("attempt", "task", "split", "version", "reward", "tokens", "trained", "ending", "shard", "row")
    for path, row, trajectory in _trajectories(place, damaged):
        table.add_row(
            trajectory.attempt_id,
            trajectory.task_id,
            trajectory.split,
            _versions(trajectory),
            f"{trajectory.reward:g}",
            str(trajectory.tokens),
            str(trajectory.trained_tokens),
            trajectory.policy_failure or trajectory.ending,
            path.name,
            str(row),
        )
    Console(width=None if Console().is_terminal else 200).print(table)
    if damaged:
        raise RunError(f"left out: {_named(damaged)}")


@app.command()
@report_errors
def show(
    place: Place,
    attempt: Annotated[str, typer.Argument(help="attempt_id, for example g000012-r3-a0.")],
    html: Annotated[Path | None, typer.Option(help="Write a page to this file instead of printing.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Model directory with the tokenizer; default: the run's own model.path.")
    ] = None,
) -> None:
    """One attempt token by token, as the model saw it: token boundaries, what is trained, versions, logprobs as colours."""
    if html is not None:
        new_file(html, force=True)
    if model is not None and not (model / "tokenizer.json").is_file():
        raise UserError(f"--model {model}: no tokenizer.json there")
    damaged: list[DataError] = []
    for path, row, trajectory in _trajectories(place, damaged):
        if trajectory.attempt_id == attempt:
            _show(path, row, trajectory, _pieces(place, model), html)
            return
    if damaged:
        raise RunError(f"no attempt {attempt} in what can be read of {place}: {_named(damaged)}")
    raise UserError(f"no attempt {attempt} in {place}; hpcrl shards ls {place} lists them")


@app.command()
@report_errors
def verify(place: Place) -> None:
    """Read every row of every shard, compare its digest and count trained tokens without a version; name what is damaged,
    and, of a run that has ended, what its database names and is not there."""
    shards, rows, trained, naked, bad = 0, 0, 0, 0, []
    for path in _shards(place):
        shards += 1
        try:
            for trajectory in ShardReader(path):
                rows += len(trajectory.messages) >= 0  # which parses them
                trained += trajectory.trained_tokens
                naked += trajectory.tokens_without_version
        except DataError as error:
            bad.append(str(error) if str(path) in str(error) else f"{path}: {error}")
    for line in bad:
        print(line)
    missing = _missing(place)
    for name in missing:
        print(f"missing: {name}, which holds samples that the run kept or trained")
    print(f"{shards} shards, {rows} trajectories read, {len(bad)} shards damaged, {len(missing)} missing")
    print(f"{trained} trained tokens, {naked} of them without a version")
    if bad:
        raise RunError(f"{len(bad)} of {shards} shards are damaged")
    if missing:
        raise RunError(f"{len(missing)} shards are missing")
    if naked:
        raise RunError(f"{naked} trained tokens carry no version")


@app.command()
@report_errors
def export(
    place: Place,
    out: Annotated[Path, typer.Option(help="File to write: .jsonl (one object per line) or .parquet.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the file if there is one.")] = False,
) -> None:
    """Write every trajectory with its tokens, logprobs, spans and transcript to one file; nothing if a shard is damaged."""
    from hpcrl.trajectory.export import export_trajectories

    try:
        count = export_trajectories(_trajectories(place), new_file(out, force))
    except DataError as error:
        raise RunError(f"{error}; nothing was written: move that shard away to export the others") from error
    print(f"{count} trajectories written to {out}")


def _shards(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    folder = place / "shards" if (place / "shards").is_dir() else place
    if not folder.is_dir():
        raise UserError(f"{place} is neither a shard nor a directory")
    paths = sorted(path for path in folder.iterdir() if path.suffix == ".h5")
    if not paths:
        raise UserError(f"no sealed shard (*.h5) in {folder}")
    return paths


def _trajectories(place: Path, damaged: list[DataError] | None = None) -> Iterator[tuple[Path, int, Trajectory]]:
    """All rows of all shards. A damaged shard is passed over, its error put into ``damaged``; without that list it is raised."""
    for path in _shards(place):
        try:
            for row, trajectory in enumerate(ShardReader(path)):
                yield path, row, trajectory
        except DataError as error:
            if damaged is None:
                raise
            damaged.append(error)


def _missing(place: Path) -> list[str]:
    """Shards that the run's database names and that are neither in their place nor quarantined; none while the run may go on."""
    run = RunDir(place)
    if not (run.database.is_file() and run.end.is_file()):
        return []
    from hpcrl.coordinator.check import kept_shards
    from hpcrl.coordinator.database import open_for_reading

    try:
        with closing(open_for_reading(run.database)) as connection:
            named = kept_shards(connection)
    except (HpcrlError, DatabaseError) as error:
        print(f"not compared with the run's database: {error}", file=sys.stderr)
        return []
    quarantined = run.shards / QUARANTINE
    return [name for name in named if not (place / name).is_file() and not (quarantined / Path(name).name).is_file()]


def _named(damaged: list[DataError]) -> str:
    return str(damaged[0]) + (f"; {len(damaged) - 1} more (hpcrl shards verify names them)" if len(damaged) > 1 else "")


def _versions(trajectory: Trajectory) -> str:
    oldest, newest = trajectory.oldest_version, trajectory.newest_version
    return str(oldest) if oldest == newest else f"{oldest}…{newest}"


def _pieces(place: Path, model: Path | None) -> Callable[[int], str]:
    """Token → text by the model's tokenizer.json; numbers, and a line that says so, when the run's own is not to be found."""
    if model is None:
        run = next((folder for folder in (place, *place.parents) if (folder / "config.resolved.yaml").is_file()), None)
        model = None if run is None else Path(load_config(run / "config.resolved.yaml").model.path)
    file = None if model is None else model / "tokenizer.json"
    if file is None or not file.is_file():
        missing = f"{place} belongs to no run" if file is None else f"there is no {file} here"
        print(f"tokens are shown as numbers: {missing}; --model DIR names the model's directory", file=sys.stderr)
        return lambda token_id: f"{token_id} "
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False)


def _show(path: Path, row: int, trajectory: Trajectory, piece: Callable[[int], str], html: Path | None) -> None:
    title = f"{trajectory.attempt_id} task {trajectory.task_id}"
    about = (
        f"reward {trajectory.reward:g} · {path.name} row {row} · {trajectory.tokens} tokens, {trajectory.trained_tokens} trained, "
        f"{len(trajectory.segments)} segment(s) · {trajectory.policy_failure or trajectory.ending} · "
        f"environment {trajectory.environment_version[:16]}, verifier {trajectory.verifier_version[:16]}"
    )
    found = cells(trajectory, piece)
    if html is not None:
        publish_text(html, render_page(title, about, found))
        print(html)
        return
    console = Console(highlight=False)
    console.print(Text(title, style="bold"), Text(about), Text(LEGEND, "grey50"), sep="\n")
    line = Text()
    for one in found:
        if isinstance(one, Heading):
            console.print(line)
            console.rule(one.text, align="left")
            line = Text()
        else:
            style = "grey50" if one.logprob is None else colour(one.logprob) + (" underline" if one.trained else "")
            line.append(plain(one.text), style).append("│", "grey30")
    console.print(line)
    timings = ", ".join(f"{name} {seconds:.3f}" for name, seconds in trajectory.timings.items())
    console.print(f"seconds: {timings}")
