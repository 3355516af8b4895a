"""A run from its first child to the last word of its coordinator: start, watch, start again, finish.

coordinator dies            the same database, another port; everybody asks again
a rank of the MPI world     the world anew from the newest checkpoint, and the coordinator with it, which forgets the replicas
workers, scorers of a node  the same again; when they begin, what they held is free for others
a component, a node         nothing is started again: Slurm's word is the reason (`allocation.py`)
the time limit is near      the trainer is asked for a checkpoint and to end
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from hpcrl.errors import InfraError, RunError
from hpcrl.launch.allocation import Allocation, Taken
from hpcrl.launch.outcome import Outcome
from hpcrl.launch.restarts import Restarts
from hpcrl.launch.signals import Signals
from hpcrl.launch.steps import Step
from hpcrl.launch.watcher import Child, Watcher, is_final
from hpcrl.protocol import client as api
from hpcrl.protocol import messages as m
from hpcrl.protocol.rundir import RunDir, publish_text
from hpcrl.protocol.status import StatusRequest

__all__ = ["Cancelled", "Roles", "TimeLimit", "drive"]

log = logging.getLogger("hpcrl.launch")

_COORDINATOR_START_S = 60.0
_FINISH_S = 60.0
_TAKEN_GRACE_S = 2.0
_NEAR_END = "the time limit is near"


class Cancelled(RunError):
    """Somebody asked the run to stop."""


class TimeLimit(RunError):
    """The run made room for the time limit; it goes on from its checkpoint when it is resumed."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Steps of a run. ``reopened``: the coordinator when all its replicas are gone. ``allocation``: the Slurm job, if it is one;
    ``answering()``: do all its nodes still start steps?"""

    coordinator: Step
    reopened: Step
    others: list[Step]
    allocation: Allocation | None = None
    answering: Callable[[], bool] = lambda: True


def drive(
    run: RunDir,
    watcher: Watcher,
    signals: Signals,
    ended: Callable[[str, str], None],
    roles: Roles,
    *,
    resume: bool,
    restarts: int,
) -> None:
    """Start everything, watch it to its end. ``ended(state, reason)`` puts the end on disk before anything slow happens.

    Raises RunError with the first cause, Cancelled, TimeLimit, Taken.
    """
    _start_coordinator(run, watcher, signals, roles.reopened if resume else roles.coordinator)
    for step in roles.others:
        watcher.start(step)
        log.info("started %s", step.name)
    again = _Again(run, watcher, roles, Restarts(restarts), signals)
    reason = watcher.wait(_Interrupts(run, signals), again)
    if signals.stop and roles.allocation is not None and (taken := roles.allocation.ending()):
        again.taken = taken
    if again.taken is not None and again.taken.outcome is Outcome.TIMEOUT:
        raise TimeLimit(f"{again.taken}, before the trainer had saved itself; the newest checkpoint counts")
    if signals.stop:
        # Before anybody is asked: the coordinator may be busy or gone, and Slurm kills us after KillWait.
        ended("cancelled", signals.stopped_by())
        if roles.allocation is not None and roles.allocation.hold_together():
            watcher.grace_s = _TAKEN_GRACE_S
            raise Cancelled(signals.stopped_by())
    elif again.taken is not None:
        # Slurm ends its roles, and the others cannot go on: nobody is asked, and nobody waited for.
        watcher.grace_s = _TAKEN_GRACE_S
        raise Cancelled(reason) if again.taken.outcome is Outcome.CANCELLED else again.taken
    _finish(run, watcher, reason)
    if signals.stop:
        raise Cancelled(signals.stopped_by())
    if reason and signals.near_end:
        raise TimeLimit(f"{_NEAR_END}: {reason}")
    if reason:
        raise RunError(reason)


def _start_coordinator(run: RunDir, watcher: Watcher, signals: Signals, step: Step) -> None:
    child = watcher.start(step)

    def starting() -> bool:
        return child.process.poll() is None and not signals.stop

    try:
        api.wait_for_endpoint(run, "coordinator", _COORDINATOR_START_S, alive=starting)
    except InfraError as error:
        if signals.stop:
            raise Cancelled(signals.stopped_by()) from error
        # Its own reason says more than its absence.
        raise RunError(str(error) if child.process.poll() is None else watcher.wait(lambda: "")) from error
    log.info("coordinator at %s", run.endpoint("coordinator"))


class _Interrupts:
    """Asked several times a second: is there a reason to end now? Passes a near time limit on to the trainer, and tells when a restart
    is over."""

    def __init__(self, run: RunDir, signals: Signals) -> None:
        self._run = run
        self._signals = signals
        self._since: float | None = None

    def __call__(self) -> str:
        self._restart()
        if self._signals.near_end and not self._run.stop.exists():
            log.info("%s: asking the trainer for a checkpoint", _NEAR_END)
            publish_text(self._run.stop, _NEAR_END + "\n")
        return self._signals.stopped_by()

    def _restart(self) -> None:
        try:
            self._since = float(self._run.restarted.read_text(encoding="utf-8"))
        except FileNotFoundError:  # the trainer took the note away
            if self._since is not None:
                log.info("first trained step %.1f s after the restart", time.time() - self._since)
            self._since = None


class _Again:
    """Told of a child that ended: starts it anew and returns "", or returns the reason to end the run with."""

    def __init__(self, run: RunDir, watcher: Watcher, roles: Roles, restarts: Restarts, signals: Signals) -> None:
        self._run = run
        self._watcher = watcher
        self._roles = roles
        self._restarts = restarts
        self._signals = signals
        self.taken: Taken | None = None

    def __call__(self, child: Child, reason: str) -> str:
        step, world = child.step, child.step.ends_run
        allocation = self._roles.allocation
        if allocation is not None and (taken := allocation.lost()):
            return self._ended(taken, reason)
        if self._signals.near_end or is_final(self._run):
            return reason
        lived = time.monotonic() - child.started
        if not self._restarts.again(step.name, reason, lived_s=lived, checkpoint=self._checkpoints(), world=world):
            told = self._restarts.told(step.name, reason)
            if allocation is not None and not self._roles.answering():
                return self._ended(Taken(Outcome.NODE_FAILURE, "a node of the job does not answer"), told)
            return told
        log.warning("%s; starting %s again", reason, step.name)
        if step.name == self._roles.coordinator.name:
            self._watcher.restart(child, self._roles.coordinator)
            return ""
        if world:
            self._run.trained.unlink(missing_ok=True)
            publish_text(self._run.restarted, f"{time.time():.3f}\n")
            coordinator = next(one for one in self._watcher.children if one.step.name == self._roles.coordinator.name)
            self._watcher.restart(coordinator, self._roles.reopened)
        self._watcher.restart(child)
        return ""

    def _ended(self, taken: Taken, reason: str) -> str:
        log.warning("%s: %s", taken, reason)
        self.taken = taken
        return str(taken)

    def _checkpoints(self) -> str:
        """Names of what is complete; the trainer writes under names that begin with a dot."""
        return " ".join(sorted(path.name for path in self._run.checkpoints.glob("[!.]*")))


def _finish(run: RunDir, watcher: Watcher, reason: str) -> None:
    """Tell everyone that it is over, let workers and scorers end by themselves, keep the final status."""
    client = api.Client(run, "admin", patience_s=10.0)
    try:
        client.call(api.FINISH, m.Finish(reason=reason))
        if not reason:
            late = watcher.wait_ended(lambda name: name.startswith(("worker", "scorer")), _FINISH_S)
            if late:
                log.warning("had to stop: %s", ", ".join(late))
        status = client.call(api.STATUS, StatusRequest())
        publish_text(run.final_status, status.model_dump_json(indent=1) + "\n")
    except InfraError as error:
        log.warning("no final status: %s", error)
    finally:
        client.close()
