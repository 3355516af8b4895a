"""Several Python callables as ONE heterogeneous Slurm job, through submitit; or the same on this machine.

    executor = HetExecutor("jobs")                       # a folder that all nodes see
    job = executor.submit_het([
        Component(train, (config,), nodes=2, gpus_per_node=8, partition="gpu"),
        Component(serve, nodes=4, partition="cpu"),
    ])
    job.components[0].result()

Slurm starts all components together or none. submitit's own names of parameters hold, with or without ``slurm_`` before them.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit.core import core, utils
from submitit.local.local import LocalExecutor
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from hpcrl.errors import UserError
from hpcrl.launch.het_script import LEADER_ONLY, end_record, het_script, task_count
from hpcrl.launch.outcome import Outcome, job_outcome, outcome_of
from hpcrl.launch.slurm import Slurm

__all__ = ["Component", "HetExecutor", "HetJob", "LocalHetExecutor"]

_POLL_S = 1.0
_DELAY_S = 15
"""Longest time between two questions to Slurm, for all jobs together; results are seen at once."""


class Component:
    """One callable and the resources it runs on.

    ``args``, ``kwargs``: what every task calls it with. ``parameters`` are submitit's: nodes, tasks_per_node, gpus_per_node,
    cpus_per_task, mem_gb, partition, timeout_min (minutes, 5 by default)… Raises UserError.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **parameters: Any,
    ) -> None:
        if not callable(function):
            raise UserError(f"Component: {function!r} cannot be called; the first argument is the function")
        if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
            raise UserError(f"Component: its arguments are {args!r}; give a tuple, of one argument too: (x,)")
        self.function = function
        self.args = tuple(args)
        self.kwargs = dict(kwargs or {})
        self.parameters = {name.removeprefix("slurm_"): value for name, value in parameters.items()}

    def delayed(self) -> utils.DelayedSubmission:
        """What submitit pickles."""
        return utils.DelayedSubmission(self.function, *self.args, **self.kwargs)


class _Watcher(core.InfoWatcher):  # type: ignore[misc]
    """States of jobs and components in Slurm's words: squeue's, else sacct's, else what the batch script noted."""

    def __init__(self, slurm: Slurm) -> None:
        super().__init__(delay_s=_DELAY_S)
        self._slurm = slurm
        self._records: dict[str, Path] = {}

    def register(self, job_id: str, folder: Path) -> None:
        self._records[job_id] = end_record(folder, job_id)
        self.register_job(job_id)

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        return str(self.get_info(job_id, mode=mode).get("State", "UNKNOWN"))

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        return outcome_of(self.get_state(job_id, mode)).over

    def update(self) -> None:
        """Ask for every job that is not known to be over."""
        waiting = self._registered - self._finished
        states = self._slurm.states(waiting)
        self._num_calls += 1
        for job_id in waiting:
            state = states.get(job_id) or self._noted(job_id)
            if state:
                self._info_dict[job_id] = {"JobID": job_id, "State": state}
                if outcome_of(state).over:
                    self._finished.add(job_id)
        self._last_status_check = time.time()

    def _noted(self, job_id: str) -> str:
        try:
            return self._records[job_id].read_text(encoding="utf-8").strip()
        except OSError:
            return ""


class _ComponentJob(SlurmJob):  # type: ignore[misc]
    """One component, id ``44+1``; submitit's Job in everything else."""

    slurm = Slurm()
    watcher: _Watcher = _Watcher(slurm)  # type: ignore[assignment]

    def _register_in_watcher(self) -> None:
        if not self._tasks[0]:
            self.watcher.register(self.job_id, self.paths.folder)

    def cancel(self, check: bool = True) -> None:
        """End this component and its step; the others go on."""
        self.slurm.cancel(self.job_id)


class HetJob:
    """A submitted job. ``components[k]`` is a job of submitit's: result(), results(), state, stdout(), stderr(), done()…"""

    def __init__(
        self,
        job_id: str,
        components: Sequence[core.Job[Any]],
        cancel: Callable[[], None],
        outcome: Callable[[], Outcome],
    ) -> None:
        self.job_id = job_id
        self.components = tuple(components)
        self.cancel = cancel
        self.outcome = outcome

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """Block until all components have ended. Raises TimeoutError; the job goes on."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not (now := self.outcome()).over:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"job {self.job_id} is still {now} after {timeout_s:g} s")
            time.sleep(_POLL_S)
        return now


class HetExecutor(SlurmExecutor):  # type: ignore[misc]
    """submitit's SlurmExecutor with :meth:`submit_het`. ``slurm``: in place of the site's commands."""

    job_class: type[Any] = _ComponentJob

    def __init__(self, folder: str | Path, slurm: Slurm | None = None, **options: Any) -> None:
        self._given, self._slurm = slurm is not None, slurm or Slurm()
        super().__init__(folder, **options)
        if slurm is not None:
            self.job_class = type("_GivenComponentJob", (_ComponentJob,), {"slurm": slurm, "watcher": _Watcher(slurm)})

    def affinity(self) -> int:  # type: ignore[override]
        """Called by submitit: is there a Slurm?"""
        return 2 if self._given else SlurmExecutor.affinity()

    def submit_het(self, components: Sequence[Component]) -> HetJob:
        """Submit one job of ``components``, which start together.

        The executor's own parameters (``update_parameters``) hold for each component that does not set them.
        Raises UserError for parameters and callables that cannot be accepted, EnvironmentFault with Slurm's reason when it
        refuses the job.
        """
        parameters = self.check(components)
        if "%" in str(self.folder):
            raise UserError(
                f"HetExecutor's folder {self.folder}: %j and the like are not filled in; choose a plain folder"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        stem = f".submission-{os.getpid()}-{time.time_ns()}"
        script = self.folder / f"{stem}.sh"
        pickles = [self.folder / f"{stem}-{index}.pkl" for index in range(len(parameters))]
        try:
            for index, path in enumerate(pickles):
                self._pickle(index, components[index], parameters[index], path)
            script.write_text(het_script(parameters, self.folder, self._submitit_command_str), encoding="utf-8")
            job_id = self._slurm.submit(script)
        except BaseException:
            for path in (script, *pickles):
                path.unlink(missing_ok=True)
            raise
        script.rename(self.folder / f"{job_id}_submission.sh")
        jobs = []
        for index, given in enumerate(parameters):
            job = self.job_class(self.folder, f"{job_id}+{index}", tasks=range(task_count(given)))
            # The tasks wait a minute for it: its name holds the job's id. Published whole, as they may be there already.
            job.paths.move_temporary_file(pickles[index], "submitted_pickle")
            jobs.append(job)
        return HetJob(
            job_id,
            jobs,
            lambda: self._slurm.cancel(job_id),
            lambda: job_outcome(outcome_of(job.watcher.get_state(job.job_id)) for job in jobs),
        )

    def check(self, components: Sequence[Component]) -> list[dict[str, Any]]:
        """Slurm's parameters of each component, the executor's defaults included. Raises UserError."""
        if not isinstance(components, Sequence) or not all(isinstance(one, Component) for one in components):
            raise UserError(f"submit_het takes a list of Components, [Component(function, …), …], not {components!r}")
        if not components:
            raise UserError("submit_het needs at least one Component")
        found = [self._parameters_of(index, component) for index, component in enumerate(components)]
        for index, component in enumerate(components):
            for name in LEADER_ONLY:
                if name in component.parameters and component.parameters[name] != found[0].get(name):
                    raise UserError(f"component {index}: {name} is set for the whole job; give it to component 0")
        return found

    def _pickle(self, index: int, component: Component, given: Mapping[str, Any], path: Path) -> None:
        delayed = component.delayed()
        delayed.set_timeout(given.get("time", 5), self.max_num_timeout)
        try:
            delayed.dump(path)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise UserError(
                f"component {index}: function and arguments cannot be handed to the tasks: {error}"
            ) from error

    def _parameters_of(self, index: int, component: Component) -> dict[str, Any]:
        try:
            given = self._convert_parameters(component.parameters)
            check = type(self)(self.folder, slurm=self._slurm)
            check.update_parameters(**given)
        except (NameError, TypeError, ValueError) as error:
            raise UserError(f"component {index}: {error}") from error
        merged = {**self.parameters, **given}
        for name, value in (("nodes", merged.get("nodes")), ("tasks_per_node", merged.get("ntasks_per_node"))):
            if value is not None and not (str(value).isdecimal() and int(value) > 0):
                raise UserError(f"component {index}: {name} is {value!r}; give a whole number, 1 or more")
        forced = {str(key).replace("_", "-") for key in merged.get("additional_parameters") or {}}
        if "array" in forced:
            raise UserError(f"component {index}: {_NO_ARRAYS}")
        if index and forced & {"requeue", "no-requeue"}:
            raise UserError(
                f"component {index}: requeue is set for the whole job; give it to component 0 "
                "(Slurm requeues a heterogeneous job only as a whole, by its leader's id)"
            )
        return merged

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        """submitit's ``submit`` (a job of one component) comes here, and ``map_array`` and ``batch`` with several."""
        if len(delayed_submissions) > 1:
            raise UserError(_NO_ARRAYS)
        found = delayed_submissions[0]
        return [self.submit_het([Component(found.function, found.args, found.kwargs)]).components[0]]


_NO_ARRAYS = (
    "Slurm has no arrays of heterogeneous jobs; submit one job for each element ([executor.submit_het(…) for …]), "
    "or use submitit's SlurmExecutor for jobs of a single component"
)


class LocalHetExecutor(LocalExecutor):  # type: ignore[misc]
    """The same calls without Slurm: every component's tasks are processes of this machine, whatever its ``nodes``."""

    def submit_het(self, components: Sequence[Component]) -> HetJob:
        """As :meth:`HetExecutor.submit_het`, which refuses the same."""
        checked = HetExecutor(self.folder, slurm=Slurm()).check(components)
        jobs = []
        for component, given in zip(components, checked, strict=True):
            single = LocalExecutor(self.folder, self.max_num_timeout, self.max_pickle_size_gb, self.python)
            single.update_parameters(timeout_min=given.get("time", 60), tasks_per_node=task_count(given))
            jobs.append(single.submit(component.function, *component.args, **component.kwargs))

        def cancel() -> None:
            for job in jobs:
                job.cancel()

        return HetJob(jobs[0].job_id, jobs, cancel, lambda: job_outcome(_local_outcome(job) for job in jobs))


def _local_outcome(job: core.Job[Any]) -> Outcome:
    """A local job is a process: it ended by itself or was interrupted."""
    if not job.done():
        return Outcome.RUNNING
    if job.state == "INTERRUPTED":
        return Outcome.CANCELLED
    paths = [job.task(index).paths.result_pickle for index in range(job.num_tasks)]
    if not all(path.exists() for path in paths):
        return Outcome.FAILURE
    return Outcome.SUCCESS if job.exception() is None else Outcome.FAILURE
