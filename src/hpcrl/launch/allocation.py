"""What Slurm has taken away from the job, asked by its launcher when a child has ended or when it is told to stop itself.

A component may be cancelled alone (``scancel 44+1``) and a node may die; the leader's batch script goes on, but steps that span the
component cannot be started again. Sentinels (`steps.sentinels`) are steps that do nothing, so that the end of a component is seen
at once and not when its roles have finished dying.

When a node fails, Slurm (22.05) requeues only the components up to the one that lost it. The others go on, and what was lost decides:

    the leader's node     the launcher is gone; steps of other components live on until the next launcher ends them (`end_old_steps`)
    another node          the others end with the launcher, and the job could never start again: it asks for them too (`hold_together`)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from hpcrl.errors import EnvironmentFault, RunError
from hpcrl.launch.environment import GROUPS
from hpcrl.launch.outcome import Outcome, outcome_in
from hpcrl.launch.slurm import Slurm

__all__ = ["Allocation", "Taken"]

log = logging.getLogger("hpcrl.launch")

_TORN_S = 1.0
"""Components that are cancelled one by one have all begun to end after so long."""
_OLD_STEPS_S = 60.0
_POLL_S = 0.5
_WORDS = {
    Outcome.TIMEOUT: "reached its time limit",
    Outcome.PREEMPTED: "was preempted",
    Outcome.NODE_FAILURE: "lost a node",
    Outcome.CANCELLED: "was cancelled",
}


class Taken(RunError):
    """Slurm ended the job or a part of it; ``outcome`` says how."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class Allocation:
    """The components of job ``job_id`` and their nodes, in Slurm's word. A Slurm that does not answer counts as nothing lost."""

    slurm: Slurm
    job_id: str

    def lost(self) -> Taken | None:
        """The first component that does not run any more; without the leader's, the job is over."""
        shown = self.slurm.components(self.job_id)
        for index, name in enumerate(GROUPS):
            row = shown.get(f"{self.job_id}+{index}")
            if row is not None and (outcome := outcome_in(*row)) is not Outcome.RUNNING:
                if not index:
                    return self._ended(outcome)
                return Taken(outcome, f"component {index} ({name}) of job {self.job_id} {_words(outcome)}")
        return None

    def ending(self) -> Taken | None:
        """Why Slurm ends the whole job, for a launcher that is being told to stop."""
        row = self.slurm.components(self.job_id).get(f"{self.job_id}+0")
        if row is None or (outcome := outcome_in(*row)) is Outcome.RUNNING:
            return None
        return self._ended(outcome)

    def hold_together(self) -> bool:
        """For a launcher that is being told to stop, at once: if Slurm ends the leader and leaves other components as they are, ask it
        to requeue them too. Was it so?"""
        if not self._leader_alone():
            return False
        time.sleep(_TORN_S)
        if not self._leader_alone():
            return False
        log.info("Slurm requeues a part of the job; asking for the rest of it")
        try:
            self.slurm.requeue(self.job_id)
        except EnvironmentFault as partly:  # what is requeued already is refused
            log.info("in the queue already, or not to be requeued: %s", partly)
        return True

    def _leader_alone(self) -> bool:
        shown = self.slurm.components(self.job_id)
        running = {job_id for job_id, row in shown.items() if outcome_in(*row) is Outcome.RUNNING}
        return f"{self.job_id}+0" in shown and f"{self.job_id}+0" not in running and bool(running)

    def end_old_steps(self, stop: Callable[[], bool]) -> None:
        """For a job that was started again, before its first step: cancel what an earlier launcher started and Slurm left running."""
        deadline = time.monotonic() + _OLD_STEPS_S
        asked = False
        while (steps := self.slurm.steps(self.job_id)) and not stop():
            if not asked:
                log.info("ending steps of the job's earlier start: %s", ", ".join(steps))
                self.slurm.cancel_steps(steps)
                asked = True
            if time.monotonic() > deadline:
                log.warning("they do not end: %s", ", ".join(steps))
                return
            time.sleep(_POLL_S)

    def _ended(self, outcome: Outcome) -> Taken:
        # While the components of a job that is preempted or requeued end, Slurm shows them as it does cancelled ones.
        words = "is ended: cancelled, preempted or requeued" if outcome is Outcome.CANCELLED else _words(outcome)
        return Taken(outcome, f"job {self.job_id} {words}")


def _words(outcome: Outcome) -> str:
    return _WORDS.get(outcome, "was ended by Slurm")
