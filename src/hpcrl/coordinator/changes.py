"""What a call changed, collected while it runs and handed to the store as rows of one transaction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hpcrl.coordinator import tables
from hpcrl.coordinator.entities import Attempt, EvalRun, Group, Replica, Rollout, Version
from hpcrl.coordinator.tables import Row
from hpcrl.protocol.states import State

__all__ = ["ChangeSet", "Changes"]


@dataclass(slots=True)
class ChangeSet:
    """Rows by table name. ``unconsume_after``: consumptions at later steps are taken back first (a resume)."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    unconsume_after: int | None = None


class Changes:
    """Objects are marked as they change and turned into rows once, in :meth:`take`, however often they changed."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._groups: dict[str, Group] = {}
        self._rollouts: dict[str, Rollout] = {}
        self._attempts: dict[str, Attempt] = {}
        self._replicas: dict[str, Replica] = {}
        self._versions: dict[str, Version] = {}
        self._evals: dict[str, EvalRun] = {}
        self._counters: dict[tuple[str, str], int] = {}
        self._rows: dict[str, list[Row]] = {}
        self._unconsume_after: int | None = None

    def group(self, group: Group) -> None:
        self._groups[group.group_id] = group

    def rollout(self, rollout: Rollout) -> None:
        self._rollouts[rollout.rollout_id] = rollout

    def attempt(self, attempt: Attempt) -> None:
        self._attempts[attempt.attempt_id] = attempt

    def replica(self, replica: Replica) -> None:
        self._replicas[replica.replica_id] = replica

    def version(self, version: Version) -> None:
        self._versions[str(version.version)] = version

    def eval(self, run: EvalRun) -> None:
        self._evals[str(run.version)] = run

    def transition(self, attempt: Attempt, old: State, new: State, at: float, cause: str) -> None:
        self._attempts[attempt.attempt_id] = attempt
        self._append("transitions", (attempt.attempt_id, old.value, new.value, at, cause))

    def rejection(self, attempt_id: str, report: str, reporter: str, reason: str, at: float) -> None:
        self._append("rejections", (attempt_id, report, reporter, reason, at))

    def consumption(self, attempt: Attempt, step: int, lag: int) -> None:
        self._append("consumptions", (attempt.rollout.rollout_id, attempt.attempt_id, step, lag, 1))

    def unconsume(self, after_step: int) -> None:
        self._unconsume_after = after_step

    def checkpoint(self, version: str, step: int, at: float) -> None:
        self._append("checkpoints", (version, step, at))

    def counter(self, name: str, item: str, value: int) -> None:
        self._counters[name, item] = value

    def meta(self, key: str, value: str) -> None:
        self._append("meta", (key, value))

    def _append(self, table: str, row: Row) -> None:
        self._rows.setdefault(table, []).append(row)

    def take(self) -> ChangeSet | None:
        """Everything since the last take, or None when nothing changed."""
        rows = self._rows
        marked: tuple[tuple[str, dict[str, Any], Callable[[Any], Row]], ...] = (
            ("groups", self._groups, tables.group_row),
            ("rollouts", self._rollouts, tables.rollout_row),
            ("attempts", self._attempts, tables.attempt_row),
            ("replicas", self._replicas, tables.replica_row),
            ("versions", self._versions, tables.version_row),
            ("evals", self._evals, tables.eval_row),
        )
        for name, objects, convert in marked:
            if objects:
                rows[name] = [convert(value) for value in objects.values()]
        if self._counters:
            rows["counters"] = [(*key, value) for key, value in self._counters.items()]
        if not rows and self._unconsume_after is None:
            return None
        taken = ChangeSet(rows, self._unconsume_after)
        self._clear()
        return taken
