"""One run from its directory to its report: the launcher, on the batch host of the heterogeneous job or on this machine.

    prepare ─► check ─► coordinator ─► roles ─► watch ─► finish (everyone stops) ─► final status ─► summary, report

Roles that die are started again (`drive.py`); the end has one readable reason, kept in ``end.json`` with the state success, failed,
cancelled or timeout.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from hpcrl.config import RunConfig, dump_config
from hpcrl.errors import EnvironmentFault, HpcrlError
from hpcrl.launch import steps as plan
from hpcrl.launch.allocation import Allocation, Taken
from hpcrl.launch.drive import Cancelled, Roles, TimeLimit, drive
from hpcrl.launch.environment import HetJob
from hpcrl.launch.preflight import check_fresh, check_inputs, check_resumable, find_mpiexec, require_commands
from hpcrl.launch.signals import Signals, collect_signals
from hpcrl.launch.slurm import Slurm
from hpcrl.launch.watcher import Watcher, first_failure
from hpcrl.protocol.address import routable_address
from hpcrl.protocol.keyfiles import issue_keys
from hpcrl.protocol.rundir import RunDir, publish_text

__all__ = ["create_run", "launch_local", "launch_slurm", "new_run_dir"]

log = logging.getLogger("hpcrl.launch")

_SWEEP_S = 20.0
_ANSWER_S = 30.0


def new_run_dir(config: RunConfig) -> Path:
    """A fresh name under ``run.dir``: NAME-DATE-TIME-xxxx."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path(config.run.dir).resolve() / f"{config.run.name}-{stamp}-{secrets.token_hex(2)}"


def create_run(root: Path, config: RunConfig) -> RunDir:
    """Make the run directory with its secret and resolved configuration. Raises UserError when it already holds a run."""
    run = RunDir(root)
    check_fresh(run.root)
    try:
        run.create()
    except OSError as error:
        raise EnvironmentFault(
            f"cannot make the run directory {run.root}: {error.strerror}; set run.dir (or --run-dir) to a place you can write to"
        ) from error
    try:
        issue_keys(run)
        publish_text(run.config, dump_config(_absolute(config)))
    except OSError as error:
        raise EnvironmentFault(f"cannot write into the run directory {run.root}: {error.strerror}") from error
    return run


def _absolute(config: RunConfig) -> RunConfig:
    """Paths as the roles must see them, whose working directory may be another. An image may also be a name in the image cache."""

    def resolved(path: str) -> str:
        return str(Path(path).resolve())

    image = config.sandbox.image
    tasks = {"train": resolved(config.tasks.train), "eval": resolved(config.tasks.eval) if config.tasks.eval else None}
    sections = {
        "run": config.run.model_copy(update={"dir": resolved(config.run.dir)}),
        "model": config.model.model_copy(update={"path": resolved(config.model.path)}),
        "tasks": config.tasks.model_copy(update=tasks),
        "sandbox": config.sandbox.model_copy(update={"image": resolved(image) if Path(image).exists() else image}),
    }
    return config.model_copy(update=sections)


def launch_slurm(root: Path, config: RunConfig, *, resume: bool = False) -> None:
    """Inside the batch script: sizes come from the allocation. Raises HpcrlError with the reason when the run does not succeed.

    A run that the time limit ended, or a lost node, is put back into the queue, ``slurm.requeues`` times at most.
    """
    require_commands("srun")
    _launch_in(HetJob.from_env(os.environ), root, config, resume)


def _launch_in(job: HetJob, root: Path, config: RunConfig, resume: bool) -> None:
    trainer, inference, _ = job.groups
    sized = config.model_copy(
        update={
            "trainer": config.trainer.model_copy(update={"ranks": trainer.tasks}),
            "inference": config.inference.model_copy(update={"replicas": inference.tasks}),
        }
    )
    run, before = _open(root, sized, resume)
    publish_text(run.job, f"{job.job_id}\n")
    host = routable_address()
    for path, script in plan.task_epilogs(run).items():
        publish_text(path, script, 0o700)
    sweep = plan.memory_sweep(run, sized)
    allocation = Allocation(Slurm(), job.job_id)
    with (
        collect_signals() as signals,
        _swept(sweep),
        Watcher(run) as watcher,
        _recorded(run, before) as record,
        _whole(allocation),
    ):
        if job.restarted:
            allocation.end_old_steps(lambda: bool(signals.stop))
        _check_shared(run, sized, signals)
        _check_sandboxes(run, plan.sandbox_check(run, sized), signals)
        record.begin()
        others = [*plan.sentinels(run, sized, job), *plan.slurm_steps(run, sized, job)]
        roles = replace(
            _roles(run, host, others),
            allocation=allocation,
            answering=lambda: _answers(plan.answer_check(sized)),
        )
        with _requeued(run, job.job_id, sized.slurm.requeues, record):
            _drive(run, sized, watcher, signals, record, roles, resume)


@contextmanager
def _requeued(run: RunDir, job_id: str, budget: int, record: _Record) -> Iterator[None]:
    """Put the job back into the queue when the time limit or a lost node ends the block. Slurm requeues preempted jobs itself."""
    try:
        yield
    except (TimeLimit, Taken) as error:
        noted = run.requeues.read_text(encoding="utf-8").split() if run.requeues.exists() else []
        count = int(noted[1]) if noted[:1] == [job_id] else 0
        if count < budget:
            # Slurm kills us a moment after this call.
            record.end("timeout" if isinstance(error, TimeLimit) else "failed", str(error))
            publish_text(run.requeues, f"{job_id} {count + 1}\n")
            log.info("%s; back into the queue (%d of %d)", error, count + 1, budget)
            try:
                Slurm().requeue(job_id)
            except EnvironmentFault as refused:
                log.warning("%s", refused)
        raise


@contextmanager
def _whole(allocation: Allocation) -> Iterator[None]:
    """The job is requeued as a whole or not at all, also when it is ended before its roles have started."""
    try:
        yield
    except Cancelled:
        allocation.hold_together()
        raise


def _answers(command: list[str]) -> bool:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def launch_local(root: Path, config: RunConfig, *, resume: bool = False) -> None:
    """The same roles on this machine alone. Raises HpcrlError with the reason when the run does not succeed."""
    mpiexec = find_mpiexec()
    run, before = _open(root, config, resume)
    run.job.unlink(missing_ok=True)
    os.environ.setdefault("HPCRL_ADDRESS", "127.0.0.1")
    with collect_signals() as signals, Watcher(run) as watcher, _recorded(run, before) as record:
        _check_sandboxes(run, plan.sandbox_check_here(run), signals)
        record.begin()
        _drive(
            run,
            config,
            watcher,
            signals,
            record,
            _roles(run, "127.0.0.1", plan.local_steps(run, config, mpiexec)),
            resume,
        )


def _roles(run: RunDir, host: str, others: list[plan.Step]) -> Roles:
    return Roles(plan.coordinator_step(run, host), plan.coordinator_step(run, host, resume=True), others)


def _drive(
    run: RunDir, config: RunConfig, watcher: Watcher, signals: Signals, record: _Record, roles: Roles, resume: bool
) -> None:
    drive(run, watcher, signals, record.end, roles, resume=resume, restarts=config.run.restarts)


def _open(root: Path, config: RunConfig, resume: bool) -> tuple[RunDir, str | None]:
    """The run directory, and what its configuration was before a resume (None: the run is new)."""
    check_inputs(config)
    if not resume:
        return create_run(root, config), None
    check_resumable(root)
    run = RunDir(root)
    issue_keys(run)
    before = run.config.read_text(encoding="utf-8")
    for stale in (*run.failures.glob("*.json"), *run.endpoints.glob("*"), run.stop):
        stale.unlink(missing_ok=True)
    publish_text(run.config, dump_config(_absolute(config)))  # the checks on the nodes read it
    return run, before


def _check(command: list[str], signals: Signals) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if signals.stop:
        raise Cancelled(signals.stopped_by())
    return result


def _check_shared(run: RunDir, config: RunConfig, signals: Signals) -> None:
    result = _check(plan.visibility_check(run, config), signals)
    if result.returncode == 0:
        return
    nodes = ", ".join(sorted({line.strip() for line in result.stdout.splitlines() if line.strip()}))
    if nodes:
        raise EnvironmentFault(
            f"the run directory {run.root} is not visible on {nodes}; choose run.dir (or --run-dir) on a file system that all "
            "nodes of the job share"
        )
    raise EnvironmentFault(f"cannot start a step on the nodes of this job: {result.stderr.strip()[-500:]}")


def _check_sandboxes(run: RunDir, command: list[str], signals: Signals) -> None:
    result = _check(command, signals)
    if result.returncode != 0:
        raise EnvironmentFault(first_failure(run) or f"the sandbox check failed: {result.stderr.strip()[-500:]}")


@contextmanager
def _swept(command: list[str]) -> Iterator[None]:
    """Run ``command`` last of all when the run did not succeed."""
    try:
        yield
    except BaseException:
        try:
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SWEEP_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            log.warning("not swept: %s", error)
        raise


class _Record:
    """What is kept of a run's end: the first word counts.

    ``before``: the configuration of the run that is resumed. What ends before ``begin`` leaves that run as it was: its configuration,
    its own end and its results.
    """

    def __init__(self, run: RunDir, before: str | None) -> None:
        self._run = run
        self._started = time.time()
        self._ended = False
        self.begun = before is None

    def begin(self) -> None:
        """All checks have passed."""
        if not self.begun:
            for old in (self._run.end, self._run.final_status, self._run.trained):
                old.unlink(missing_ok=True)
            publish_text(self._run.restarted, f"{self._started:.3f}\n")
        self.begun = True

    def end(self, state: str, reason: str) -> None:
        """Write end.json."""
        if self.begun and not self._ended:
            end = {"state": state, "reason": reason, "started_at": self._started, "ended_at": time.time()}
            publish_text(self._run.end, json.dumps(end) + "\n")
            self._ended = True


@contextmanager
def _recorded(run: RunDir, before: str | None) -> Iterator[_Record]:
    """Whatever happens inside is the run's end, written to end.json, and reported.

    Enter it inside the Watcher: a cancelled job has seconds before Slurm kills it, and the end must be on disk before children that
    are slow to stop are waited for.
    """
    record = _Record(run, before)
    state, reason = "success", ""
    try:
        yield record
    except HpcrlError as error:
        states: dict[type[HpcrlError], str] = {Cancelled: "cancelled", TimeLimit: "timeout"}
        state, reason = states.get(type(error), "failed"), str(error)
        raise
    except BaseException as error:
        state, reason = "failed", f"{type(error).__name__}: {error}"
        raise
    finally:
        record.end(state, reason)
        if record.begun:
            _report(run)
        elif before is not None:
            publish_text(run.config, before)


def _report(run: RunDir) -> None:
    from hpcrl.report import write_report

    try:
        write_report(run.root)
    except (HpcrlError, OSError, ValueError) as error:
        log.warning("no report: %s", error)
