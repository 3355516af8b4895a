"""The life of one rollout, read from the database: its attempts, every transition with time and cause, and what came too late."""

from __future__ import annotations

from sqlite3 import Connection

from hpcrl.protocol.history import AttemptHistory, HistoryEvent, RolloutHistory

__all__ = ["rollout_history"]

_GROUP = (
    "SELECT r.rollout_id, r.group_id, r.state, r.infra_failures, r.data_failures, g.task_id, g.split "
    "FROM rollouts r JOIN groups g ON g.group_id = r.group_id WHERE r.rollout_id = ?"
)
_ATTEMPTS = (
    "SELECT attempt_id, state, worker_id, scorer_id, replica_id, policy_version, reward, shard, row, consumed_step "
    "FROM attempts WHERE attempt_id >= ? AND attempt_id < ? ORDER BY leased_at, rowid"
)
_TRANSITIONS = "SELECT at, from_state, to_state, cause FROM transitions WHERE attempt_id = ? ORDER BY rowid"
_REJECTIONS = "SELECT at, report, reporter, reason FROM rejections WHERE attempt_id = ? ORDER BY rowid"


def rollout_history(connection: Connection, name: str) -> RolloutHistory | None:
    """History of the rollout ``name`` (``g000012-r3``; an attempt's id names its rollout); None when there is none of that name."""
    rollout_id = name.rpartition("-a")[0] if name.rpartition("-a")[2].isdecimal() else name
    found = connection.execute(_GROUP, (rollout_id,)).fetchone()
    if found is None:
        return None
    _, group_id, state, infra, data, task_id, split = found
    attempts, events = [], []
    for row in connection.execute(_ATTEMPTS, (f"{rollout_id}-a", f"{rollout_id}-b")).fetchall():
        attempt = AttemptHistory(**dict(zip(_ATTEMPT_FIELDS, row, strict=True)))
        attempts.append(attempt)
        events += _events(connection, attempt.attempt_id)
    return RolloutHistory(
        rollout_id=rollout_id,
        group_id=group_id,
        task_id=task_id,
        split=split,
        state=state,
        infra_failures=infra,
        data_failures=data,
        attempts=attempts,
        events=sorted(events, key=lambda event: event.at),
    )


_ATTEMPT_FIELDS = (
    *("attempt_id", "state", "worker_id", "scorer_id", "replica_id", "policy_version"),
    *("reward", "shard", "row", "consumed_step"),
)


def _events(connection: Connection, attempt_id: str) -> list[HistoryEvent]:
    moves = [
        HistoryEvent(at=at, attempt_id=attempt_id, what=f"{old} → {new}", cause=cause)
        for at, old, new, cause in connection.execute(_TRANSITIONS, (attempt_id,))
    ]
    late = [
        HistoryEvent(at=at, attempt_id=attempt_id, what=f"{report} report rejected", cause=reason, by=reporter)
        for at, report, reporter, reason in connection.execute(_REJECTIONS, (attempt_id,))
    ]
    return moves + late
