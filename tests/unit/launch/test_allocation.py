"""What Slurm's answers mean to a launcher."""

from __future__ import annotations

import pytest

from hpcrl.launch.allocation import Allocation
from hpcrl.launch.outcome import Outcome, outcome_in
from hpcrl.launch.slurm import Slurm

RUNNING = ("RUNNING", "None")


class Answers(Slurm):
    def __init__(self, rows: dict[str, tuple[str, str]]) -> None:
        self._rows = rows

    def components(self, job_id: str) -> dict[str, tuple[str, str]]:
        return self._rows


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
