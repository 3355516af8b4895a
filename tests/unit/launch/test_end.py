"""How a run's end gets on disk."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.errors import RunError
from hpcrl.launch import allocation, drive, job
from hpcrl.launch.allocation import Allocation, Taken
from hpcrl.launch.outcome import Outcome
from hpcrl.launch.signals import Signals
from hpcrl.launch.slurm import Slurm
from hpcrl.launch.steps import Step
from hpcrl.protocol.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    found.create()
    return found


def end(run: RunDir) -> tuple[str, str]:
    content = json.loads(run.end.read_text())
    return content["state"], content["reason"]


class Children:
    """Stands in for the Watcher: the coordinator announces itself, or never does; a signal comes at a chosen moment."""

    def __init__(self, run: RunDir, signals: Signals, *, while_starting: bool) -> None:
        self._run, self._signals, self._while_starting = run, signals, while_starting

    def start(self, step: Step) -> Any:
        if self._while_starting:
            self._signals.stop.append(signal.SIGTERM)
        else:
            self._run.announce("coordinator", "http://127.0.0.1:9")
        return SimpleNamespace(process=SimpleNamespace(poll=lambda: None))

    def wait(self, interrupted: Callable[[], str], _: object) -> str:
        self._signals.stop.append(signal.SIGTERM)
        assert interrupted()
        return "mpi ended with exit code 143"  # Slurm ends the steps at the same moment


@pytest.mark.parametrize("while_starting", [True, False])
def test_a_cancelled_run_records_its_end_before_it_asks_anybody(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, while_starting: bool
) -> None:
    """The coordinator may be gone or busy, and Slurm kills the launcher a few seconds after the signal."""
    when_asked: list[tuple[str, str]] = []
    monkeypatch.setattr(drive, "_finish", lambda run, *_: when_asked.append(end(run)))
    monkeypatch.setattr(job, "_report", lambda _: None)
    signals = Signals()
    step = Step("coordinator", ["true"], run.logs("coordinator") / "log")
    with pytest.raises(RunError), job._recorded(run, None) as record:
        children = Children(run, signals, while_starting=while_starting)
        drive.drive(run, children, signals, record.end, drive.Roles(step, step, []), resume=False, restarts=0)  # type: ignore[arg-type]
    assert end(run) == ("cancelled", "stopped by SIGTERM")
    assert when_asked == ([] if while_starting else [("cancelled", "stopped by SIGTERM")])


def test_the_first_word_about_the_end_counts(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_report", lambda _: None)
    with pytest.raises(RunError), job._recorded(run, None) as record:
        record.end("cancelled", "first")
        raise RunError("second")
    assert end(run) == ("cancelled", "first")


class Answers(Slurm):
    def __init__(self, state: str, reason: str) -> None:
        self.row, self.calls = (state, reason), list[str]()

    def components(self, job_id: str) -> dict[str, tuple[str, str]]:
        return {f"{job_id}+0": self.row}

    def requeue(self, job_id: str) -> None:
        self.calls.append(f"requeue {job_id}")


@pytest.mark.parametrize(("reason", "state"), [("TimeLimit", "timeout"), ("None", "cancelled")])
def test_a_signal_from_slurm_means_what_slurm_says(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, reason: str, state: str
) -> None:
    monkeypatch.setattr(drive, "_finish", lambda *_: None)
    monkeypatch.setattr(job, "_report", lambda _: None)
    signals, step = Signals(), Step("coordinator", ["true"], run.logs("coordinator") / "log")
    roles = drive.Roles(step, step, [], Allocation(Answers("COMPLETING", reason), "44"))
    with pytest.raises(RunError), job._recorded(run, None) as record:
        children = Children(run, signals, while_starting=False)
        drive.drive(run, children, signals, record.end, roles, resume=False, restarts=0)  # type: ignore[arg-type]
    assert end(run)[0] == state


@pytest.mark.parametrize("error", [drive.TimeLimit("near"), Taken(Outcome.NODE_FAILURE, "lost a node")])
def test_a_job_goes_back_into_the_queue_as_often_as_it_may(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, error: RunError
) -> None:
    slurm = Answers("RUNNING", "None")
    monkeypatch.setattr(job, "Slurm", lambda: slurm)
    for job_id, expected in (("44", 1), ("44", 2), ("44", 2), ("45", 3)):
        record = job._Record(run, None)
        with pytest.raises(RunError), job._requeued(run, job_id, 2, record):
            raise error
        assert len(slurm.calls) == expected
    assert run.requeues.read_text().split() == ["45", "1"]


def test_a_cancelled_run_is_not_requeued(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Answers("RUNNING", "None")
    monkeypatch.setattr(job, "Slurm", lambda: slurm)
    with pytest.raises(RunError), job._requeued(run, "44", 2, job._Record(run, None)):
        raise drive.Cancelled("stopped by SIGTERM")
    assert slurm.calls == []


@pytest.mark.parametrize(("others", "calls"), [("RUNNING", ["requeue 44"]), ("COMPLETING", [])])
def test_what_slurm_does_not_requeue_of_a_job_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, others: str, calls: list[str]
) -> None:
    monkeypatch.setattr(allocation, "_TORN_S", 0.0)

    class Parts(Answers):
        def components(self, job_id: str) -> dict[str, tuple[str, str]]:
            return {f"{job_id}+0": self.row, f"{job_id}+2": (others, "None")}

    slurm = Parts("COMPLETING", "None")
    with pytest.raises(drive.Cancelled), job._whole(Allocation(slurm, "44")):
        raise drive.Cancelled("stopped by SIGTERM")
    assert slurm.calls == calls


def test_a_job_that_is_torn_is_held_together_before_a_coordinator_is_asked_that_may_be_gone(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(allocation, "_TORN_S", 0.0)
    monkeypatch.setattr(drive, "_finish", never)

    class Parts(Answers):
        def components(self, job_id: str) -> dict[str, tuple[str, str]]:
            return {f"{job_id}+0": self.row, f"{job_id}+2": ("RUNNING", "None")}

    slurm, signals, step = Parts("COMPLETING", "None"), Signals(), Step("coordinator", ["true"], run.logs("x") / "log")
    roles = drive.Roles(step, step, [], Allocation(slurm, "44"))
    children = Children(run, signals, while_starting=False)
    with pytest.raises(drive.Cancelled):
        drive.drive(run, children, signals, lambda *_: None, roles, resume=False, restarts=0)  # type: ignore[arg-type]
    assert slurm.calls == ["requeue 44"]
