"""Stored artifacts scored again with other tests: for `hpcrl score RUN --verifier NEW`.

    coordinator.db ──► attempts with an artifact ──► one scoring per task and artifact, in a fresh sandbox ──► RUN/scores/DIGEST.jsonl

What the run itself recorded is never changed: results are lines of a file named by the digest of all the new tests, so another
verifier writes another file. A line is written when its attempt is done; called again, attempts with a score are skipped and failed
ones are tried again.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcrl.config import RunConfig
from hpcrl.errors import DataError, InfraError, UserError
from hpcrl.protocol.rundir import RunDir
from hpcrl.run.sandboxes import Images, limits_of, unusable
from hpcrl.sandbox.digests import combine
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.pool import SandboxPool
from hpcrl.sandbox.tasks import list_tasks
from hpcrl.scoring.artifacts import load_artifact
from hpcrl.scoring.private import PrivateTask, load_private
from hpcrl.scoring.runner import score

__all__ = ["Rescored", "Stored", "Summary", "new_verifiers", "rescore", "scores_file", "stored_attempts", "summary"]

_SAME = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """An attempt that left an artifact, as the run recorded it. ``reward`` is None when it got no score."""

    attempt_id: str
    task_id: str
    split: str
    artifact: str
    digest: str
    environment_version: str
    reward: float | None
    verifier_version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rescored:
    """One line of the file. ``failure`` says why there is no new score: ``artifact_missing: …``."""

    attempt_id: str
    task_id: str
    split: str
    digest: str
    old_reward: float | None
    old_verifier: str
    reward: float | None = None
    verifier: str = ""
    rewards: dict[str, float] = field(default_factory=dict)
    policy_failure: str | None = None
    failure: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Counts of attempts. ``raised`` and ``lowered`` are changes of a score; ``new``: those that had none. ``failures`` by reason."""

    attempts: int
    same: int
    raised: int
    lowered: int
    new: int
    failed: int
    failures: dict[str, int]
    mean_before: float | None
    mean_after: float | None


def stored_attempts(run: RunDir) -> list[Stored]:
    """Raises UserError when the run has not begun, EnvironmentFault while it is being served."""
    from hpcrl.coordinator.database import open_for_reading

    connection = open_for_reading(run.database)
    try:
        rows = connection.execute(
            "SELECT a.attempt_id, g.task_id, g.split, a.artifact, a.digest, a.environment_version, a.reward, a.verifier_version "
            "FROM attempts a JOIN groups g ON g.group_id = a.group_id WHERE a.digest != '' ORDER BY a.attempt_id"
        ).fetchall()
    finally:
        connection.close()
    return [
        Stored(
            attempt_id=row[0],
            task_id=row[1],
            split=row[2],
            artifact=row[3],
            digest=row[4],
            environment_version=row[5] or "",
            reward=row[6],
            verifier_version=row[7] or "",
        )
        for row in rows
    ]


def new_verifiers(folder: Path) -> dict[str, PrivateTask]:
    """Task id → its new tests: ``folder`` is one task, or holds tasks. Raises UserError."""
    paths = [folder] if (folder / "task.toml").exists() else list_tasks(folder)
    tasks = [load_private(path) for path in paths]
    return {task.public.task_id: task for task in tasks}


def scores_file(run: RunDir, verifiers: dict[str, PrivateTask]) -> Path:
    """Where results with these tests go."""
    versions = [f"{name}={task.verifier_version}" for name, task in sorted(verifiers.items())]
    return run.root / "scores" / f"{combine(*versions)[:23]}.jsonl"


async def rescore(
    run: RunDir,
    config: RunConfig,
    attempts: list[Stored],
    verifiers: dict[str, PrivateTask],
    pool: SandboxPool,
    at_once: int,
    done: Callable[[int], None] = lambda _: None,
) -> list[Rescored]:
    """Score what is not scored yet; returns the result of every attempt, also of earlier calls. ``done`` gets numbers of attempts.

    Raises UserError when another process writes the same file.
    """
    images, limits = Images(config), limits_of(config)
    with _opened(scores_file(run, verifiers)) as (known, write):
        by_work: dict[tuple[str, str, str], list[Stored]] = {}
        for attempt in attempts:
            earlier = known.get(attempt.attempt_id)
            if earlier is None or earlier.failure is not None:
                work = (attempt.task_id, attempt.digest, attempt.environment_version)
                by_work.setdefault(work, []).append(attempt)
        done(len(attempts) - sum(map(len, by_work.values())))
        slots = asyncio.Semaphore(at_once)

        async def one(same: list[Stored]) -> None:
            async with slots:
                results = await _score(run, same, verifiers.get(same[0].task_id), images, limits, pool)
            for result in results:
                known[result.attempt_id] = result
                write(result)
            done(len(results))

        async with asyncio.TaskGroup() as group:
            for same in by_work.values():
                group.create_task(one(same))
        return [known[attempt.attempt_id] for attempt in attempts]


async def _score(
    run: RunDir, same: list[Stored], task: PrivateTask | None, images: Images, limits: Limits, pool: SandboxPool
) -> list[Rescored]:
    """Results of attempts at one task that left the same artifact; the one place where a failure is recorded."""
    first = same[0]
    try:
        if task is None:
            raise DataError("no_verifier", f"the new tests have no task {first.task_id}")
        artifact = await asyncio.to_thread(load_artifact, run, first.artifact, first.digest)
        image = await images.for_attempt(task.public)
        if image is not None and task.public.environment_version(image) != first.environment_version:
            raise DataError(
                "environment_changed", f"the image or files of {first.task_id} are not those of the attempt"
            )
        result = await score(task, artifact, image, limits, pool, f"score-{first.attempt_id}")
    except UserError as error:
        return [_line(attempt, failure=str(unusable(error))) for attempt in same]
    except (InfraError, DataError) as error:
        return [_line(attempt, failure=str(error)) for attempt in same]
    return [
        _line(
            attempt,
            reward=result.reward,
            rewards=result.rewards,
            verifier=result.verifier_version,
            policy_failure=result.policy_failure,
        )
        for attempt in same
    ]


def _line(attempt: Stored, **values: Any) -> Rescored:
    return Rescored(
        attempt_id=attempt.attempt_id,
        task_id=attempt.task_id,
        split=attempt.split,
        digest=attempt.digest,
        old_reward=attempt.reward,
        old_verifier=attempt.verifier_version,
        **values,
    )


@contextmanager
def _opened(path: Path) -> Iterator[tuple[dict[str, Rescored], Callable[[Rescored], None]]]:
    """(what the file says, how to add a line). A line that a killed process left half written does not count."""
    path.parent.mkdir(exist_ok=True)
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{path} is being written by another `hpcrl score`: wait for it") from None
        file.seek(0)
        content = file.read()
        known = {}
        for line in content.splitlines():
            try:
                result = Rescored(**json.loads(line))
            except (ValueError, TypeError):
                continue
            known[result.attempt_id] = result
        if content and not content.endswith(b"\n"):
            file.write(b"\n")

        def write(result: Rescored) -> None:
            file.write(json.dumps(asdict(result)).encode() + b"\n")
            file.flush()

        yield known, write
        os.fsync(file.fileno())


def summary(results: list[Rescored]) -> Summary:
    """What the new tests changed. Means are over attempts with both scores."""
    both = [(r.old_reward, r.reward) for r in results if r.old_reward is not None and r.reward is not None]
    failures = Counter((r.failure or "").split(":")[0] for r in results if r.failure is not None)
    return Summary(
        attempts=len(results),
        same=sum(abs(new - old) <= _SAME for old, new in both),
        raised=sum(new - old > _SAME for old, new in both),
        lowered=sum(old - new > _SAME for old, new in both),
        new=sum(r.old_reward is None and r.reward is not None for r in results),
        failed=sum(failures.values()),
        failures=dict(failures),
        mean_before=sum(old for old, _ in both) / len(both) if both else None,
        mean_after=sum(new for _, new in both) / len(both) if both else None,
    )
