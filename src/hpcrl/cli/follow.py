"""Progress of a run for a person: a live panel on a terminal, one line per change elsewhere.

Everything shown comes from the coordinator's status call and, at the end, from the run directory; following never changes a run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from hpcrl.config import load_config
from hpcrl.errors import HpcrlError, InfraError, RunError, UserError
from hpcrl.protocol import client as api
from hpcrl.protocol.rundir import RunDir
from hpcrl.protocol.status import Status, StatusRequest

__all__ = ["follow", "follow_while", "lost_job", "read_end", "show", "wait_lines"]

_POLL_S = 1.0
_LOST_S = 5.0
_SUMMARY_S = 30.0
_ENDED = {"cancelled": "was cancelled", "timeout": "came to its time limit"}


def follow(run: RunDir, lost: Callable[[], str] | None = None, old_end: str | None = None) -> None:
    """Show progress until the run has ended. Raises RunError when it did not succeed.

    ``lost()`` is asked now and then: a reason means that there is nothing left to wait for although no end was recorded. By default
    it is asked of the Slurm job that the run names, if it names one. Where it can be asked, only success is the end at once: after a
    time limit, a lost node or a preemption the job may be in the queue again, to go on from the checkpoint; the end is known when
    the job is over. ``old_end`` is the record of an earlier end, which a resume replaces.
    """
    with _Display(run) as display:
        asked, passing = time.monotonic(), None
        while True:
            gone = lost or _noted_job(run)
            recorded = read_end(run)
            if recorded not in (None, old_end):
                end = _end_of(run, recorded)
                if gone is None or end["state"] == "success" or gone():
                    break
                old_end = passing = recorded
                display.say(f"{end['state']}: {end['reason']}; waiting for Slurm to end the job, or to start it again")
            display.update()
            time.sleep(_POLL_S)
            if gone is not None and time.monotonic() - asked > _LOST_S:
                reason, asked = gone(), time.monotonic()
                if reason and (now := read_end(run)) in (None, old_end):
                    if now is None or passing is None:
                        raise RunError(reason)
                    recorded = passing
                    break
        display.update()
    end = _end_of(run, recorded)
    _await_summary(run)
    _print_result(run)
    if end["state"] != "success":
        raise RunError(f"the run {_ENDED.get(end['state'], end['state'])}: {end['reason']}")


def _await_summary(run: RunDir) -> None:
    """The launcher records the end first, and writes the summary seconds later, or never when it is killed."""
    deadline = time.monotonic() + _SUMMARY_S
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if run.summary.stat().st_mtime_ns >= run.end.stat().st_mtime_ns:
                return
        time.sleep(_POLL_S)


def read_end(run: RunDir) -> str | None:
    """The record of the run's end, or None while there is none."""
    try:
        return run.end.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def _end_of(run: RunDir, recorded: str | None) -> dict[str, Any]:
    end = _object(run.end, recorded or "")
    if not {"state", "reason"} <= set(end):
        raise UserError(f"{run.end} is damaged: it names no state and reason")
    return end


def _object(path: Path, text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it holds no object")
    return content


def _noted_job(run: RunDir) -> Callable[[], str] | None:
    """:func:`lost_job` of the job that the run names; None for a run of one machine, and where there is no Slurm to ask."""
    try:
        job_id = run.job.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    return _lost_job_once(job_id) if shutil.which("squeue") else None


def lost_job(job_id: str) -> Callable[[], str]:
    """For :func:`follow`: the Slurm job is over without an end of the run (its launcher died, it was cancelled in the queue)."""
    from hpcrl.launch.submit import job_output, job_states

    output = job_output(job_id)  # asked while Slurm knows the job
    running = {"PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "RESIZING"}

    def lost() -> str:
        states = job_states(job_id)
        if states is None or states & running:
            return ""
        lines = output.read_text(encoding="utf-8", errors="replace").split("\n") if output.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        said = f": {last}" if last else ""
        return f"job {job_id} ended ({', '.join(sorted(states)).lower() or 'unknown to Slurm'}) before its run did{said} ({output})"

    return lost


_lost_job_once = functools.cache(lost_job)


def follow_while(run: RunDir, work: Callable[[], None]) -> None:
    """Do ``work`` here (it may handle signals) while a thread shows the progress of ``run``."""
    done = threading.Event()

    def watch() -> None:
        with _Display(run) as display:
            while not done.wait(_POLL_S):
                display.update()

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
    _print_result(run)


def show(run: RunDir, as_json: bool = False) -> None:
    """One snapshot: the line a person wants first, then who waits for what and since when; of a run that is over, how it ended.

    Raises RunError for a run that is over without a record of its end, or does not answer.
    """
    console = Console()
    if run.end.exists():
        end = _end_of(run, read_end(run))
        if as_json:
            console.print_json(data=end)
            return
        console.print(f"{run.run_id}: {end['state']}" + (f" ({end['reason']})" if end["reason"] else ""))
        _print_result(run)
        return
    client = api.Client(run, "admin", patience_s=3.0)
    try:
        status = client.call(api.STATUS, StatusRequest())
    except InfraError as error:
        gone = _noted_job(run)
        if gone is not None and (reason := gone()):
            raise RunError(f"{reason}; sbatch slurm/launch_hetjob.sh --resume {run.root} continues it") from error
        raise RunError(
            f"{run.run_id} does not answer: it is starting, its coordinator is being started again, or it was cut off ({error})"
        ) from error
    finally:
        client.close()
    if as_json:
        console.print_json(status.model_dump_json())
        return
    steps = load_config(run.config).trainer.steps
    print(f"{run.run_id}: step {status.step}/{steps}, version {status.version or '–'} · {describe(status)}")
    for line in wait_lines(status, time.time()):
        print(line)


def wait_lines(status: Status, now: float) -> list[str]:
    """``trainer waits for batch 0.7 for 12 s: 2 of 4 groups complete; …``, one line per waiting party."""
    lines = [
        f"{wait.who} waits for {wait.what} for {max(0.0, now - wait.since):.0f} s: {wait.why}" for wait in status.waits
    ]
    return lines or ["nobody waits"]


def _print_result(run: RunDir) -> None:
    from hpcrl.report import summary_table

    if run.summary.exists():
        summary = _object(run.summary, run.summary.read_text(encoding="utf-8", errors="replace"))
        try:
            table = summary_table(summary)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{run.summary} is damaged; hpcrl report {run.root} writes it again") from error
        Console().print(table)
        print(f"summary: {run.summary}\nreport:  {run.report}", flush=True)


def describe(status: Status) -> str:
    """One line: what a person wants to know first."""
    reward = "–" if status.recent_reward is None else f"{status.recent_reward:.2f}"
    evals = [f"{result.version}: {result.success:.2f}" for result in status.eval if result.success is not None]
    pending = [
        f"evaluating {result.version} {result.done}/{result.total}" for result in status.eval if result.success is None
    ]
    lag = max(status.lag_histogram, default=0)
    return (
        f"reward {reward} · held-out {', '.join(evals[-3:]) or '–'} · lag ≤ {lag} · "
        f"in flight {status.in_flight}, ready {status.accepted_unused}" + (f" · {pending[-1]}" if pending else "")
    )


class _Display:
    """Progress bar on a terminal; elsewhere a line whenever the step, an evaluation or the stage changes."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._console = Console()
        self._client: api.Client | None = None
        self._shown = ""
        self._task: TaskID | None = None
        self._progress = Progress(
            TextColumn("[bold]step"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    def __enter__(self) -> _Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._client is not None:
            self._client.close()

    def update(self) -> None:
        """Ask once; a coordinator that is not there yet or any more is a stage, not an error."""
        try:
            status = self._status()
        except (HpcrlError, OSError):
            return
        if status is None:
            if self._task is None and not self._run.end.exists():
                what = "the run to start" if self._run.root.is_dir() else f"{self._run.root} to appear"
                self._say(f"waiting for {what}", f"waiting for {what}")
            return
        total = load_config(self._run.config).trainer.steps
        if self._task is None:
            self._task = self._progress.add_task("", total=total)
        stage = describe(status) if status.version else f"loading models ({len(status.replicas)} replicas registered)"
        self._progress.update(self._task, completed=status.step, description=stage)
        evals = [(result.version, result.success) for result in status.eval]
        self._say(f"step {status.step}/{total} · {stage}", f"{status.step} {status.version is None} {evals}")

    def _status(self) -> Status | None:
        if self._run.endpoint("coordinator") is None or self._run.end.exists():
            return None
        if self._client is None:
            self._client = api.Client(self._run, "admin", patience_s=1.0)
        try:
            return self._client.call(api.STATUS, StatusRequest())
        except InfraError:
            return None

    def say(self, line: str) -> None:
        """Something that is not progress, on either kind of output."""
        self._console.print(f"{time.strftime('%H:%M:%S')} {line}", highlight=False, soft_wrap=True)

    def _say(self, line: str, key: str) -> None:
        if self._console.is_terminal or key == self._shown:
            return
        self._shown = key
        print(time.strftime("%H:%M:%S"), line, flush=True)
