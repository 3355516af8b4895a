"""A run from its first child to the last word of its coordinator: start, watch, start again, finish.

coordinator dies            the same database, another port; everybody asks again
a rank of the MPI world     the world anew from the newest checkpoint, and the coordinator with it, which forgets the replicas
workers, scorers of a node  the same again; what they held is tried again when its lease ends
the time limit is near      the trainer is asked for a checkpoint and to end
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from hpcrl.errors import InfraError, RunError
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
_NEAR_END = "the time limit is near"


class Cancelled(RunError):
    """Somebody asked the run to stop."""


class TimeLimit(RunError):
    """The run made room for the time limit; it goes on from its checkpoint when it is resumed."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Steps of a run. ``reopened``: the coordinator when all its replicas are gone."""

    coordinator: Step
    reopened: Step
    others: list[Step]


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

    Raises RunError with the first cause, Cancelled, TimeLimit.
    """
    _start_coordinator(run, watcher, signals, roles.reopened if resume else roles.coordinator)
    for step in roles.others:
        watcher.start(step)
        log.info("started %s", step.name)
    reason = watcher.wait(_Interrupts(run, signals), _Again(run, watcher, roles, Restarts(restarts), signals))
    if signals.stop:
        # Before anybody is asked: the coordinator may be busy or gone, and Slurm kills us after KillWait.
        ended("cancelled", signals.stopped_by())
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
    """Asked several times a second: is there a reason to end now? Passes a near time limit on to the trainer."""

    def __init__(self, run: RunDir, signals: Signals) -> None:
        self._run = run
        self._signals = signals

    def __call__(self) -> str:
        if self._signals.near_end and not self._run.stop.exists():
            log.info("%s: asking the trainer for a checkpoint", _NEAR_END)
            publish_text(self._run.stop, _NEAR_END + "\n")
        return self._signals.stopped_by()


class _Again:
    """Told of a child that ended: starts it anew and returns "", or returns the reason to end the run with."""

    def __init__(self, run: RunDir, watcher: Watcher, roles: Roles, restarts: Restarts, signals: Signals) -> None:
        self._run = run
        self._watcher = watcher
        self._roles = roles
        self._restarts = restarts
        self._signals = signals

    def __call__(self, child: Child, reason: str) -> str:
        step, world = child.step, child.step.ends_run
        if self._signals.near_end or is_final(self._run):
            return reason
        lived = time.monotonic() - child.started
        if not self._restarts.again(step.name, reason, lived_s=lived, checkpoint=self._checkpoints(), world=world):
            return self._restarts.told(step.name, reason)
        log.warning("%s; starting %s again", reason, step.name)
        if step.name == self._roles.coordinator.name:
            self._watcher.restart(child, self._roles.coordinator)
            return ""
        if world:
            self._run.trained.unlink(missing_ok=True)
            coordinator = next(one for one in self._watcher.children if one.step.name == self._roles.coordinator.name)
            self._watcher.restart(coordinator, self._roles.reopened)
        self._watcher.restart(child)
        return ""

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
