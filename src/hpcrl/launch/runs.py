"""A run of hpcrl from Python: submit it, look at it, wait for it, cancel it.

run = submit_run("configs/quickstart.yaml", trainer={"steps": 20}, run={"seed": 1})
run.wait()
run.metrics()["steps"]
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hpcrl.config import load_config
from hpcrl.errors import EnvironmentFault, UserError
from hpcrl.launch.job import new_run_dir
from hpcrl.launch.outcome import Outcome, job_outcome, outcome_of
from hpcrl.launch.preflight import check_fresh, check_inputs, check_resumable
from hpcrl.launch.script import after_option, run_script
from hpcrl.launch.slurm import Slurm
from hpcrl.protocol.rundir import RunDir

__all__ = ["SCRIPT", "Run", "Submission", "prepare", "submit_run"]

SCRIPT = Path("slurm/launch_hetjob.sh")

_POLL_S = 2.0
_ENDS = {
    "success": Outcome.SUCCESS,
    "cancelled": Outcome.CANCELLED,
    "timeout": Outcome.TIMEOUT,
    "failed": Outcome.FAILURE,
}
_SLURM_KNOWS_BETTER = (Outcome.PREEMPTED, Outcome.NODE_FAILURE, Outcome.TIMEOUT)
"""Inside the job these look like a signal or like nothing at all."""


@dataclass(frozen=True, slots=True)
class Run:
    """A submitted run: its directory and the id of its job."""

    root: Path
    job_id: str
    slurm: Slurm

    @property
    def status(self) -> Outcome:
        """Slurm's word; what the run itself recorded of its end counts where Slurm says nothing, or less."""
        states = self.slurm.states([self.job_id])
        slurm = job_outcome(outcome_of(state) for job_id, state in states.items() if "+" in job_id) if states else None
        if slurm is not None and (not slurm.over or slurm in _SLURM_KNOWS_BETTER):
            return slurm
        recorded = self.end().get("state")
        return _ENDS.get(str(recorded), Outcome.UNKNOWN) if recorded else slurm or Outcome.UNKNOWN

    def end(self) -> dict[str, Any]:
        """The run's own record of its end: state, reason, started_at, ended_at (s since 1970); empty while it runs."""
        return _json(RunDir(self.root).end)

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """Block until the run is over. Raises TimeoutError; the run goes on."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not (now := self.status).over:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"run {self.root.name} (job {self.job_id}) is still {now} after {timeout_s:g} s")
            time.sleep(_POLL_S)
        return now

    def cancel(self) -> None:
        """``scancel`` of all components."""
        self.slurm.cancel(self.job_id)

    def metrics(self) -> dict[str, Any]:
        """The run's summary.json (see the report package); empty until the run has ended."""
        return _json(RunDir(self.root).summary)


@dataclass(frozen=True, slots=True)
class Submission:
    """What would be given to sbatch."""

    root: Path
    text: str


def prepare(
    config: Path | str | None,
    sets: Sequence[str] = (),
    *,
    run_dir: Path | str | None = None,
    resume: Path | None = None,
    after: str | int | None = None,
    sbatch: Sequence[str] = (),
) -> Submission:
    """Check everything that can be checked here, and write the script. Call it from the project's root directory.

    ``run_dir``: where the run writes, a fresh directory (default: one under ``run.dir``). ``after``: the job whose end, of
    whatever kind, it waits for. ``sbatch``: more options of sbatch, ``:`` between components:
    ``["--nodes=2", ":", "--nodes=4"]``. Raises UserError, EnvironmentFault.
    """
    try:
        script = SCRIPT.read_text(encoding="utf-8")
    except OSError as error:
        raise EnvironmentFault(f"{SCRIPT} is not here; call this from the project's root directory") from error
    options = [*([after_option(after)] if after else []), *_no_arrays(sbatch)]
    loaded = load_config(config or RunDir(resume or Path()).config, list(sets))
    check_inputs(loaded)
    root = Path(resume or run_dir or new_run_dir(loaded)).resolve()
    if resume is None:
        check_fresh(root)
        arguments = [str(config), "--run-dir", str(root)]
    else:
        check_resumable(root)
        arguments = ["--resume", str(root)]
    arguments += [part for item in sets for part in ("--set", item)]
    return Submission(root, run_script(script, arguments, options))


def send(submission: Submission, slurm: Slurm) -> Run:
    """Give it to sbatch. Raises EnvironmentFault with Slurm's reason."""
    with TemporaryDirectory(prefix="hpcrl-submit-") as folder:
        path = Path(folder) / SCRIPT.name
        path.write_text(submission.text, encoding="utf-8")
        return Run(submission.root, slurm.submit(path), slurm)


def submit_run(
    config: Path | str,
    *,
    run_dir: Path | str | None = None,
    after: str | int | None = None,
    sbatch: Sequence[str] = (),
    slurm: Slurm | None = None,
    **overrides: Any,
) -> Run:
    """Submit a run; ``overrides`` are sections of the configuration: ``trainer={"steps": 20}, mode="sync"``.

    Call it from the project's root directory. ``run_dir``, ``after`` (another run's ``job_id``) and ``sbatch``
    (``["--nodes=2", ":", "--nodes=4"]``) are explained at :func:`prepare`; ``slurm`` stands in for the site's commands.

    Raises UserError, EnvironmentFault.
    """
    sets = [f"{key}={json.dumps(value)}" for key, value in _leaves(overrides)]
    return send(prepare(config, sets, run_dir=run_dir, after=after, sbatch=sbatch), slurm or Slurm())


def _no_arrays(options: Sequence[str]) -> Sequence[str]:
    if isinstance(options, str):
        raise UserError(f"sbatch={options!r}: give a list, one option an element: ['--nodes=2', ':', '--nodes=4']")
    if any(option.partition("=")[0] == "--array" for option in options):
        raise UserError("--array: Slurm has no arrays of heterogeneous jobs; submit one run for each element")
    return options


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found += _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, (str, int, float, bool, list, dict, type(None))):
            found.append((f"{prefix}{key}", value))
        else:
            raise UserError(
                f"{prefix}{key}: {type(value).__name__} is no value of a configuration; give text, number, list or None"
            )
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
