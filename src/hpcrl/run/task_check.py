"""Whether tasks are fit to train on: well-formed, solved by their own solution, not by doing nothing, and the same each time.

files read ─► image found or built ─► twice: the solution must score 1, doing nothing less than 1
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hpcrl.errors import EnvironmentFault, UserError
from hpcrl.run.trials import NOTHING, ORACLE, Trial, images_with, try_tasks
from hpcrl.sandbox.harbor import remarks
from hpcrl.sandbox.images import resolve
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.pool import SandboxPool
from hpcrl.sandbox.task_keys import misspelt
from hpcrl.sandbox.tasks import list_tasks, read_toml
from hpcrl.scoring.private import PrivateTask, load_private

__all__ = ["CheckedTask", "find_tasks", "read_task", "run_checks"]

_ROUNDS = 2

_REMEDIES = {
    "verifier_background": "the tests leave a process that came loose from test.sh, so even a right answer scores 0: "
    "end and `wait` for what is started in the background before the reward is written "
    "(with `exec > >(tee log)`, close the pipe and wait)",
    "verifier_timeout": "the tests do not end in time: raise [verifier] timeout_sec, or find what waits",
    "no_reward": "the tests must write /logs/verifier/reward.txt or reward.json in every case, also when a check fails",
    "bad_reward": "the tests must write one finite number to reward.txt, or a table of names and such numbers to reward.json, "
    "not both",
    "verifier_killed": "the tests were killed from outside: most often for want of memory ([environment] memory_mb)",
    "verifier_interrupted": "test.sh ends with status 130, as if interrupted, so a reward above 0 does not count: end it with `exit 0`",
    "verifier_locked": "the tests make their reward file or /logs/verifier read-only, as somebody does who forges it: leave the modes",
    "memory_limit": "raise [environment] memory_mb and the run's sandbox.memory_mib",
    "disk_limit": "raise [environment] storage_mb and the run's sandbox.disk_mib",
}


@dataclass(slots=True)
class CheckedTask:
    """``problems`` make a task unfit, ``notes`` do not. ``oracle`` and ``nothing``: rewards in order, None where there was none."""

    path: Path
    task: PrivateTask | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    oracle: list[float | None] = field(default_factory=list)
    nothing: list[float | None] = field(default_factory=list)


def find_tasks(places: list[Path]) -> list[Path]:
    """Task directories: each of ``places`` is one, or holds them, or holds sets of them. Raises UserError when one holds none."""
    found: list[Path] = []
    for place in places:
        if (place / "task.toml").exists():
            found.append(place)
        elif not any(place.glob("*/task.toml")) and (
            sets := sorted({path.parents[1] for path in place.glob("*/*/task.toml")})
        ):
            found += find_tasks(sets)
        else:
            list_tasks(place)  # at least one; a run reads every sub-directory, so each must be a task
            found += sorted(path for path in place.iterdir() if path.is_dir() and not path.name.startswith("."))
    return found


def read_task(path: Path) -> CheckedTask:
    """What the files alone tell. Builds and starts nothing."""
    where = path / "task.toml"
    checked = CheckedTask(path)
    try:
        checked.task = load_private(path)
    except UserError as error:
        checked.problems.append(str(error))
        return checked
    table = read_toml(where)
    public = checked.task.public
    checked.problems += [f"{where}: {line}" for line in misspelt(table)]
    checked.notes += remarks(table, public.directory)
    if checked.task.solution is None:
        checked.notes.append("there is no solution/solve.sh: that the task can be solved is not shown")
    if public.image is not None:
        try:
            resolve(public.image, public.directory, build=False)
        except UserError as error:
            checked.problems.append(f"{where}: {error}")
        except EnvironmentFault as error:
            checked.notes.append(str(error))
    return checked


async def run_checks(
    tasks: list[CheckedTask],
    image: str,
    limits: Limits,
    pool: SandboxPool,
    at_once: int,
    done: Callable[[Trial], None] = lambda _: None,
) -> None:
    """Try the tasks without problems and add what is found. ``image`` is for tasks that name none. Raises EnvironmentFault."""

    image_of = images_with(image)
    for checked in tasks:  # each image once, before several attempts ask for it
        if checked.task is not None and not checked.problems:
            try:
                await asyncio.to_thread(image_of, checked.task)
            except (UserError, EnvironmentFault) as error:
                checked.problems.append(f"{checked.path}: {error}")
    fit = [checked for checked in tasks if not checked.problems]
    wanted = [
        (checked, agent)
        for checked in fit
        for agent in (ORACLE, NOTHING) * _ROUNDS
        if checked.task is not None and (agent is NOTHING or checked.task.solution is not None)
    ]
    trials = await try_tasks(
        [(checked.task, agent) for checked, agent in wanted if checked.task is not None],
        image_of,
        limits,
        pool,
        at_once,
        done,
    )
    for checked in fit:
        of_task = [trial for (other, _), trial in zip(wanted, trials, strict=True) if other is checked]
        _judge(checked, of_task)


def _judge(checked: CheckedTask, trials: list[Trial]) -> None:
    found: dict[str, None] = {}  # in order, each once
    for agent, rewards in (("oracle", checked.oracle), ("nothing", checked.nothing)):
        own = [trial for trial in trials if trial.agent == agent]
        rewards += [trial.reward for trial in own]
        for trial in own:
            found |= dict.fromkeys(_trouble(trial))
        if len(set(rewards)) > 1:
            found[f"{_WHO[agent]} does not score the same each time: {', '.join(map(_shown, rewards))}"] = None
    checked.problems += found


_WHO = {"oracle": "the solution", "nothing": "doing nothing"}


def _trouble(trial: Trial) -> list[str]:
    who = _WHO[trial.agent]
    if trial.failure is not None:
        reason = trial.failure.split(":")[0]
        remedy = _REMEDIES.get(reason) or _REMEDIES.get(reason.removeprefix("verifier_"))
        ended = "scores 0" if trial.reward is not None else "gets no score"
        return [f"{who} {ended}: {trial.failure}" + (f"; {remedy}" if remedy else "")]
    if trial.agent == "oracle" and trial.reward != 1:
        return [f"the solution scores {_shown(trial.reward)}, not 1" + (f": {trial.detail!r}" if trial.detail else "")]
    if trial.agent == "nothing" and trial.reward is not None and trial.reward >= 1:
        return ["doing nothing scores 1: the tests pass without the task being done"]
    return []


def _shown(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:g}"
