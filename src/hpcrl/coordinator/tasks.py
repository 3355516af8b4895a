"""Which task the next group draws: a seeded shuffle per epoch, a pure function of the group's number.

So a restarted coordinator goes on where it was without remembering anything but the number of groups created.
"""

from __future__ import annotations

import random
from pathlib import Path

from hpcrl.coordinator.entities import Task
from hpcrl.errors import ConfigError

__all__ = ["TaskOrder", "find_tasks"]


def find_tasks(directory: str, key: str) -> list[Task]:
    """The task directories under ``directory``, by name. ``key`` names the configuration key in errors. Raises ConfigError."""
    root = Path(directory).resolve()
    try:
        names = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise ConfigError(
            f"{key}: cannot read {root}: {error.strerror}; it must be a directory of task directories"
        ) from error
    if not names:
        raise ConfigError(f"{key}: {root} holds no task directory; each task is one sub-directory with instruction.md")
    return [Task(name, str(root / name)) for name in names]


class TaskOrder:
    """Task of group number ``seq``: epoch ``seq // len(tasks)`` visits every task once, in its own shuffled order."""

    def __init__(self, tasks: list[Task], seed: int) -> None:
        if not tasks:
            raise ConfigError("tasks.train: there must be at least one task")
        self._tasks = tasks
        self._seed = seed
        self._epoch = -1
        self._order: list[Task] = []

    def __getitem__(self, seq: int) -> Task:
        epoch, place = divmod(seq, len(self._tasks))
        if epoch != self._epoch:
            self._order = list(self._tasks)
            random.Random(f"{self._seed}-{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._order[place]
