"""Start the children of a run, watch them, and say in one line why the first one failed.

launcher ── starts ──► coordinator, mpi step, workers, scorers
         ── polls ───► any exit while the run is on:
                         the step that ends the run, code 0, and the trainer's last word  → success
                         anything else                       → ``again`` may start it anew, else the run ends with the first reason

A launcher that is killed takes its children along: the kernel sends them SIGTERM (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpcrl.errors import EnvironmentFault, UserError
from hpcrl.launch.steps import Step
from hpcrl.protocol.rundir import RunDir

__all__ = ["Child", "Watcher", "first_failure", "is_final"]

_POLL_S = 0.2
_TERM_GRACE_S = 15.0
_REASON_GRACE_S = 2.0
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""How a child ends that was killed, or the step whose task was: srun adds 128."""
_TAIL_BYTES = 65536
_ERROR_LINES = 20
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class Child:
    step: Step
    process: subprocess.Popen[bytes]
    log_start: int
    """Length of the log before this child; a resumed run appends to it."""
    started: float = field(default_factory=time.monotonic)

    def ended(self) -> str:
        """How it ended, readable."""
        code = self.process.poll()
        if code is None:
            return "is running"
        if code < 0:
            return f"was killed by signal {-code} ({signal.strsignal(-code) or 'unknown'})"
        return f"ended with exit code {code}"


def _die_with_launcher() -> None:
    """In the child, before exec: SIGTERM when the thread that started it ends, however it ends. Start children in the main thread."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Watcher:
    """Owns the children of one run. Use as a context manager: nothing survives it."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self.children: list[Child] = []
        self.grace_s = _TERM_GRACE_S
        """How long children that are told to stop may take."""

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_all()

    def start(self, step: Step) -> Child:
        """Start one child in its own process group, its output appended to its log. Raises EnvironmentFault."""
        try:
            for folder in (step.log.parent, *step.folders):
                folder.mkdir(parents=True, exist_ok=True)
            with open(step.log, "ab") as log:
                log_start = log.tell()
                process = subprocess.Popen(
                    step.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **step.env},
                    start_new_session=True,
                    preexec_fn=_die_with_launcher,
                )
        except OSError as error:
            raise EnvironmentFault(f"cannot start {step.name}: {error.filename}: {error.strerror}") from error
        child = Child(step, process, log_start)
        self.children.append(child)
        return child

    def wait(
        self, interrupted: Callable[[], str], again: Callable[[Child, str], str] = lambda _, reason: reason
    ) -> str:
        """Block until the run is over. Returns "" for success, else the reason. ``interrupted()`` may end it with a reason.

        ``again(child, reason)`` is told of a child that ended; it returns "" when it has started it anew, else why not.
        """
        while True:
            reason = interrupted()
            if reason:
                return reason
            for child in list(self.children):
                code = child.process.poll()
                if code is None:
                    continue
                # srun can end with 0 although its tasks never started, so its word alone is not enough.
                if code == 0 and child.step.ends_run and self._run.trained.exists():
                    return _stopped_early(self._run)
                if interrupted():
                    break
                if reason := again(child, self._why(child)):
                    return reason
                break  # the list is another now
            time.sleep(_POLL_S)

    def wait_ended(self, names: Callable[[str], bool], timeout_s: float) -> list[str]:
        """Wait for children to end by themselves; names of those that did not."""
        deadline = time.monotonic() + timeout_s
        waiting = [child for child in self.children if names(child.step.name)]
        while waiting and time.monotonic() < deadline:
            waiting = [child for child in waiting if child.process.poll() is None]
            time.sleep(_POLL_S / 4)
        return [child.step.name for child in waiting if child.process.poll() is None]

    def restart(self, child: Child, step: Step | None = None) -> Child:
        """End what is left of ``child``, put the reasons of its roles aside, and start its step (or ``step``) again."""
        if child.process.poll() is None:
            self.stop([child])
        else:
            _signal(child, signal.SIGKILL)  # what its leader left behind in the group
        self.children.remove(child)
        aside = self._run.failures / "restarted"
        for path in [path for role in child.step.roles for path in self._run.failures.glob(f"{role}-*.json")]:
            aside.mkdir(exist_ok=True)
            path.replace(aside / path.name)
        return self.start(step or child.step)

    def stop_all(self) -> None:
        """Terminate what still runs, last started first; kill what does not follow."""
        self.stop(list(reversed(self.children)))

    def stop(self, children: list[Child]) -> None:
        """The same for some of them."""
        running = [child for child in children if child.process.poll() is None]
        for child in running:
            _signal(child, signal.SIGTERM)
        deadline = time.monotonic() + self.grace_s
        for child in running:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
            _signal(child, signal.SIGKILL)  # also what its leader left behind in the group
            child.process.wait()

    def _why(self, child: Child) -> str:
        # A dying rank may still be writing its reason while its srun has already gone. Who was killed writes none; the ranks of a
        # world that are killed are those that another one took along.
        silent = child.process.poll() in _KILLED and not child.step.ends_run
        deadline = time.monotonic() + (0.0 if silent else _REASON_GRACE_S)
        while True:
            if reason := first_failure(self._run):
                return reason
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        tail = "; ".join(line for line in (_last_word(child), _task_error(child.step)) if line)
        return f"{child.step.name} {child.ended()}{f': {tail}' if tail else ''} (log: {child.step.log})"


def _stopped_early(run: RunDir) -> str:
    """Why a trainer that ended well did not reach the configured step; "" when it did."""
    result = json.loads(run.trained.read_text(encoding="utf-8"))
    return f"the trainer was asked to stop at step {result['steps']}" if result["stopped_early"] else ""


def is_final(run: RunDir) -> bool:
    """The first reason says that another try would end as this one did: wrong input, or something that the machine lacks."""
    entries = [json.loads(path.read_text(encoding="utf-8")) for path in run.failures.glob("*.json")]
    if not entries:
        return False
    first = min(entries, key=lambda entry: float(entry["at"]))
    return first.get("exit_code") in (UserError.exit_code, EnvironmentFault.exit_code)


def first_failure(run: RunDir) -> str | None:
    """The earliest reason that a role recorded, with its role and node."""
    entries = [json.loads(path.read_text(encoding="utf-8")) for path in run.failures.glob("*.json")]
    if not entries:
        return None
    first = min(entries, key=lambda entry: float(entry["at"]))
    return f"{first['role']} on {first['node']}: {first['reason']}"


def _signal(child: Child, number: int) -> None:
    try:
        os.killpg(child.process.pid, number)
    except ProcessLookupError:
        return


def _last_word(child: Child) -> str:
    """srun's first error (what follows is how it stopped the others), else the last line."""
    lines = _lines(child.step.log, child.log_start)
    return next((line for line in lines if line.startswith("srun: error:")), lines[-1] if lines else "")[:300]


def _task_error(step: Step) -> str:
    """What a task of the step said of an error in its own last lines: a library that ends the process leaves no other reason."""
    for log in (log for folder in step.folders for log in sorted(folder.glob("[0-9]*.log"))):
        for line in _lines(log)[-_ERROR_LINES:]:
            if "error" in line.lower() and not line.startswith("slurmstepd"):
                return f"{log.parent.name}/{log.name}: {line[:300]}"
    return ""


def _lines(path: Path, start: int = 0) -> list[str]:
    """The lines at the end of a log, from byte ``start`` on, that are not empty."""
    try:
        with open(path, "rb") as file:
            file.seek(max(start, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]
