"""Budgets of restarts."""

from __future__ import annotations

from hpcrl.launch.restarts import Restarts


def test_a_budget_ends_with_the_first_cause() -> None:
    restarts = Restarts(2)
    assert restarts.again("worker-0", "out of memory", lived_s=3)
    assert restarts.again("worker-0", "no coordinator", lived_s=3)
    assert not restarts.again("worker-0", "echo", lived_s=3)
    assert restarts.told("worker-0", "echo") == "out of memory (restarted 2 times without progress; at last: echo)"


def test_each_step_has_its_own() -> None:
    restarts = Restarts(1)
    assert restarts.again("worker-0", "a", lived_s=3)
    assert restarts.again("worker-1", "b", lived_s=3)
    assert not restarts.again("worker-1", "b", lived_s=3)
    assert restarts.told("worker-1", "b") == "b (restarted 1 times without progress)"


def test_none_at_all() -> None:
    restarts = Restarts(0)
    assert not restarts.again("mpi", "a", lived_s=1e6, world=True)
    assert restarts.told("mpi", "a") == "a"


def test_a_step_that_lived_for_long_starts_with_a_full_budget() -> None:
    restarts = Restarts(1)
    assert restarts.again("scorer-0", "a", lived_s=3)
    assert restarts.again("scorer-0", "b", lived_s=700)
    assert not restarts.again("scorer-0", "c", lived_s=3)
    assert restarts.told("scorer-0", "c").startswith("b (")


def test_only_a_new_checkpoint_is_progress_of_the_world() -> None:
    restarts = Restarts(1)
    assert restarts.again("mpi", "a", lived_s=1e6, checkpoint="0.2", world=True)
    assert not restarts.again("mpi", "b", lived_s=1e6, checkpoint="0.2", world=True)
    assert restarts.again("mpi", "c", lived_s=3, checkpoint="0.2 0.4", world=True)
