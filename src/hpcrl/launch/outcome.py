"""How a Slurm job ended, in hpcrl's words. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable

__all__ = ["Outcome", "job_outcome", "leader_of", "outcome_in", "outcome_of"]


class Outcome(enum.StrEnum):
    """What became of a job or of one component of it."""

    UNKNOWN = "unknown"
    """Slurm does not know it (any more) and nobody left a record."""
    PENDING = "pending"
    RUNNING = "running"
    SUCCESS = "success"
    FAILURE = "failure"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    NODE_FAILURE = "node failure"

    @property
    def over(self) -> bool:
        """It will not change any more."""
        return self not in (Outcome.UNKNOWN, Outcome.PENDING, Outcome.RUNNING)


_STATES = {
    "BOOT_FAIL": Outcome.NODE_FAILURE,
    "CANCELLED": Outcome.CANCELLED,
    "COMPLETED": Outcome.SUCCESS,
    "COMPLETING": Outcome.RUNNING,
    "CONFIGURING": Outcome.RUNNING,
    "DEADLINE": Outcome.TIMEOUT,
    "FAILED": Outcome.FAILURE,
    "NODE_FAIL": Outcome.NODE_FAILURE,
    "OUT_OF_MEMORY": Outcome.FAILURE,
    "PENDING": Outcome.PENDING,
    "PREEMPTED": Outcome.PREEMPTED,
    "REQUEUED": Outcome.PENDING,
    "REQUEUE_FED": Outcome.PENDING,
    "REQUEUE_HOLD": Outcome.PENDING,
    "RESIZING": Outcome.RUNNING,
    "REVOKED": Outcome.CANCELLED,
    "RUNNING": Outcome.RUNNING,
    "SIGNALING": Outcome.RUNNING,
    "SPECIAL_EXIT": Outcome.FAILURE,
    "STAGE_OUT": Outcome.RUNNING,
    "STOPPED": Outcome.RUNNING,
    "SUSPENDED": Outcome.RUNNING,
    "TIMEOUT": Outcome.TIMEOUT,
}

_FIRST = (Outcome.NODE_FAILURE, Outcome.PREEMPTED, Outcome.TIMEOUT, Outcome.FAILURE, Outcome.CANCELLED)
"""Which component's end explains the job's: Slurm cancels the others after a node failure, a preemption or a time limit."""


def outcome_of(state: str) -> Outcome:
    """Slurm's word for a state → outcome. sacct adds to it: ``CANCELLED by 1000``, ``CANCELLED+``."""
    word = state.split(" ")[0].rstrip("+").upper()
    return _STATES.get(word, Outcome.UNKNOWN)


_REASONS = {
    "NodeDown": Outcome.NODE_FAILURE,
    "NodeFail": Outcome.NODE_FAILURE,
    "Preempted": Outcome.PREEMPTED,
    "TimeLimit": Outcome.TIMEOUT,
}


def outcome_in(state: str, reason: str) -> Outcome:
    """squeue's ``%T`` and ``%r`` of a component, seen from inside the job: one that is completing has been ended, for that reason."""
    if state == "COMPLETING":
        return _REASONS.get(reason, Outcome.CANCELLED)
    return outcome_of(state)


def job_outcome(components: Iterable[Outcome]) -> Outcome:
    """The outcome of a heterogeneous job: it goes on as long as one component does, and succeeds when all do."""
    found = list(components)
    for going_on in (Outcome.RUNNING, Outcome.PENDING, Outcome.UNKNOWN):
        if going_on in found:
            return going_on
    return next((outcome for outcome in _FIRST if outcome in found), Outcome.SUCCESS)


def leader_of(job_id: str) -> str:
    """``44+1`` → ``44``: the id that Slurm's commands take for the whole job."""
    return job_id.split("+")[0]
