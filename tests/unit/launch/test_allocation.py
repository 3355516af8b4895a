"""What Slurm's answers mean to a launcher."""

from __future__ import annotations

import pytest

from hpcrl.errors import EnvironmentFault
from hpcrl.launch import allocation
from hpcrl.launch.allocation import Allocation
from hpcrl.launch.outcome import Outcome, outcome_in
from hpcrl.launch.slurm import Slurm

RUNNING = ("RUNNING", "None")


class Answers(Slurm):
    def __init__(self, rows: dict[str, tuple[str, str]], *later: dict[str, tuple[str, str]]) -> None:
        self._rows, self.requeued = [rows, *later], list[str]()

    def components(self, job_id: str) -> dict[str, tuple[str, str]]:
        return self._rows.pop(0) if len(self._rows) > 1 else self._rows[0]

    def requeue(self, job_id: str) -> None:
        self.requeued.append(job_id)
        raise EnvironmentFault("a part of it is in the queue")


class Steps(Slurm):
    """``lives``: how often each step is still seen after it was cancelled."""

    def __init__(self, lives: dict[str, int]) -> None:
        self.lives, self.cancelled = lives, list[str]()

    def steps(self, job_id: str) -> list[str]:
        for step in self.cancelled:
            self.lives[step] -= 1
        return [step for step, count in self.lives.items() if count > 0]

    def cancel_steps(self, steps: list[str]) -> None:
        assert not self.cancelled
        self.cancelled = steps


def of(*rows: tuple[str, str]) -> Allocation:
    return Allocation(Answers({f"44+{index}": row for index, row in enumerate(rows)}), "44")


def test_all_components_run() -> None:
    assert of(RUNNING, RUNNING, ("CONFIGURING", "None")).lost() is None


def test_a_slurm_that_does_not_answer_has_taken_nothing() -> None:
    assert of().lost() is None
    assert of().ending() is None


@pytest.mark.parametrize(
    ("row", "outcome", "words"),
    [
        (("COMPLETING", "None"), Outcome.CANCELLED, "was cancelled"),
        (("CANCELLED", "None"), Outcome.CANCELLED, "was cancelled"),
        (("COMPLETING", "NodeDown"), Outcome.NODE_FAILURE, "lost a node"),
        (("NODE_FAIL", "NodeDown"), Outcome.NODE_FAILURE, "lost a node"),
        (("COMPLETING", "TimeLimit"), Outcome.TIMEOUT, "reached its time limit"),
        (("PENDING", "BeginTime"), Outcome.PENDING, "was ended by Slurm"),
    ],
)
def test_a_lost_component_is_named_with_its_end(row: tuple[str, str], outcome: Outcome, words: str) -> None:
    taken = of(RUNNING, row, RUNNING).lost()
    assert taken is not None
    assert (taken.outcome, str(taken)) == (outcome, f"component 1 (inference) of job 44 {words}")


def test_why_the_whole_job_ends() -> None:
    taken = of(("COMPLETING", "TimeLimit"), RUNNING, RUNNING).ending()
    assert taken is not None
    assert (taken.outcome, str(taken)) == (Outcome.TIMEOUT, "job 44 reached its time limit")
    assert of(RUNNING).ending() is None


def test_a_job_that_runs_is_no_end() -> None:
    assert outcome_in("RUNNING", "None") is Outcome.RUNNING


ENDS, QUEUED = ("COMPLETING", "None"), ("PENDING", "BeginTime")


@pytest.mark.parametrize("torn", [(ENDS, QUEUED, RUNNING), (QUEUED, RUNNING, RUNNING), (ENDS, ENDS, RUNNING)])
def test_a_job_of_which_a_part_is_left_running(
    torn: tuple[tuple[str, str], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocation, "_TORN_S", 0.0)
    job = of(*torn)
    assert job.hold_together()
    assert job.slurm.requeued == ["44"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("whole", [(RUNNING, ENDS, RUNNING), (ENDS, ENDS, ENDS), (RUNNING, RUNNING, RUNNING), ()])
def test_a_job_that_ends_or_goes_on_as_a_whole(
    whole: tuple[tuple[str, str], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocation, "_TORN_S", 0.0)
    job = of(*whole)
    assert not job.hold_together()
    assert job.slurm.requeued == []  # type: ignore[attr-defined]


def test_components_that_are_cancelled_one_after_the_other_are_no_torn_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "_TORN_S", 0.0)
    first, then = ({f"44+{index}": row for index, row in enumerate(rows)} for rows in ((ENDS, RUNNING), (ENDS, ENDS)))
    assert not Allocation(Answers(first, then), "44").hold_together()


def test_old_steps_are_cancelled_once_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "_POLL_S", 0.0)
    slurm = Steps({"45.4": 3, "46.5": 1})
    Allocation(slurm, "44").end_old_steps(lambda: False)
    assert slurm.cancelled == ["45.4", "46.5"]
    assert slurm.lives["45.4"] <= 0


@pytest.mark.parametrize("stop", [True, False])
def test_old_steps_that_do_not_end_are_not_waited_for_when_asked_to_stop_or_for_ever(
    stop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocation, "_OLD_STEPS_S", 0.0)
    slurm = Steps({"45.4": 1_000_000})
    Allocation(slurm, "44").end_old_steps(lambda: stop)
    assert slurm.cancelled == ([] if stop else ["45.4"])
