"""Reading live state back from the database: at a restart, and the consumed groups that a resume takes back.

Leases get a fresh deadline, because their owners could not be heard meanwhile. Replicas keep the version they serve.
"""

from __future__ import annotations

import heapq
import json
import sqlite3
from collections.abc import Iterator
from typing import Any

from hpcrl.coordinator.entities import (
    BOUND,
    LIVE,
    Attempt,
    EvalRun,
    Group,
    Position,
    Replica,
    ReplicaState,
    Rollout,
    Task,
    Version,
)
from hpcrl.coordinator.ledger import Ledger
from hpcrl.coordinator.queue import Queue
from hpcrl.coordinator.stragglers import note_ripe
from hpcrl.coordinator.tables import TABLES
from hpcrl.protocol.states import State
from hpcrl.protocol.version import PolicyVersion

__all__ = ["count_duplicates", "groups_consumed_after", "restore"]

_ENDED_REMEMBERED = 20_000
_KEPT_STATES = LIVE | {State.ACCEPTED, State.CONSUMED}


def restore(queue: Queue, connection: sqlite3.Connection, now: float) -> None:
    """Fill a fresh queue with what the database holds (nothing, for a new one)."""
    ledger = queue.ledger
    meta = dict(connection.execute("SELECT key, value FROM meta"))
    ledger.position = Position(int(meta.get("lineage", -1)), int(meta.get("step", 0)))
    ledger.floor = int(meta.get("floor", 0))
    ledger.finished = json.loads(meta.get("finished", "null"))
    ledger.next_seq = connection.execute(
        "SELECT coalesce(max(seq), -1) + 1 FROM groups WHERE split = 'train'"
    ).fetchone()[0]
    _restore_counters(ledger, connection)
    for row in _rows(connection, "replicas"):
        ledger.replicas[row["replica_id"]] = _replica(row, now)
    for row in _rows(connection, "versions"):
        known = _version(row)
        ledger.versions[known.version] = known
    for row in _rows(connection, "evals"):
        run = _eval(row)
        ledger.evals[run.version] = run
    for group in sorted(_groups(connection, "g.state IN ('open', 'complete')", ()), key=_place):
        _enter(ledger, group, now)
    ledger.given_up = json.loads(meta.get("given_up", "null"))
    if "failing" in meta:
        ledger.failing.load(meta["failing"])
    last = _groups(connection, "g.state = 'consumed' AND g.consumed_step = ?", (ledger.position.step,))
    queue.trainer.restore_batch(list(last))


def _place(group: Group) -> tuple[str, int, bool]:
    return (group.split, group.seq, group.head is not None)


def groups_consumed_after(connection: sqlite3.Connection, step: int) -> list[Group]:
    """The groups whose consumption at a later step is to be taken back."""
    return list(_groups(connection, "g.state = 'consumed' AND g.consumed_step > ?", (step,)))


def count_duplicates(connection: sqlite3.Connection) -> int:
    """Rollouts consumed more than once (must be 0). Counted by the database, independently of the live state."""
    count: int = connection.execute("SELECT count(*) FROM consumptions WHERE times > 1").fetchone()[0]
    return count


def _rows(
    connection: sqlite3.Connection, table: str, where: str = "", args: tuple[Any, ...] = ()
) -> Iterator[dict[str, Any]]:
    names = TABLES[table].names
    columns = ", ".join(f"t.{name}" for name in names)
    for values in connection.execute(f"SELECT {columns} FROM {table} t {where}", args):
        yield dict(zip(names, values, strict=True))


def _groups(connection: sqlite3.Connection, condition: str, args: tuple[Any, ...]) -> Iterator[Group]:
    """Groups with their rollouts, each with its live, accepted or consumed attempt."""
    groups = {
        row["group_id"]: _group(row)
        for row in _rows(connection, "groups", f"WHERE {condition.replace('g.', 't.')}", args)
    }
    joined = f"JOIN groups g ON g.group_id = t.group_id WHERE {condition}"
    rollouts: dict[str, Rollout] = {}
    for row in _rows(connection, "rollouts", f"{joined} ORDER BY t.idx", args):
        group = groups[row["group_id"]]
        rollout = Rollout(
            rollout_id=row["rollout_id"],
            group=group,
            index=row["idx"],
            tries=row["tries"],
            infra_failures=row["infra_failures"],
            data_failures=row["data_failures"],
            state=State(row["state"]),
        )
        group.rollouts.append(rollout)
        rollouts[rollout.rollout_id] = rollout
    kept = ", ".join(f"'{state.value}'" for state in sorted(_KEPT_STATES))
    for row in _rows(connection, "attempts", f"{joined} AND t.state IN ({kept})", args):
        rollout = rollouts[row["rollout_id"]]
        rollout.attempt = _attempt(row, rollout)
        rollout.state = rollout.attempt.state
    yield from groups.values()


def _enter(ledger: Ledger, group: Group, now: float) -> None:
    """Put a restored group and its attempts into the live structures."""
    ledger.groups[group.group_id] = group
    group.unended = sum(not rollout.ended for rollout in group.rollouts)
    if group.split == "train" and group.head is None:
        ledger.unconsumed += 1
    if group.state == "complete":
        ledger.set_complete(group)
    note_ripe(ledger, group, now)
    for rollout in group.rollouts:
        attempt = rollout.attempt
        if rollout.state is State.PENDING:
            ledger.enqueue(rollout)
        elif attempt is not None:
            _enter_attempt(ledger, attempt, now)


def _enter_attempt(ledger: Ledger, attempt: Attempt, now: float) -> None:
    ledger.attempts[attempt.attempt_id] = attempt
    if attempt.state is State.ACCEPTED:
        ledger.tally.accepted_unused += attempt.rollout.group.split == "train"
        return
    attempt.lease_until = now + ledger.config.coordinator.lease_s
    heapq.heappush(
        ledger.leases, (now, attempt.attempt_id)
    )  # looked at by the next tick: its wall-clock limit may be over
    if attempt.state in BOUND:
        ledger.replicas[attempt.replica_id].live[attempt.attempt_id] = attempt
    elif attempt.state is State.ARTIFACT_READY:
        if attempt.scorer_id is None:
            ledger.scoring[attempt.attempt_id] = attempt
        else:
            attempt.scoring_until = now + ledger.config.scoring.lease_s
            heapq.heappush(ledger.scoring_leases, (attempt.scoring_until, attempt.attempt_id))


def _restore_counters(ledger: Ledger, connection: sqlite3.Connection) -> None:
    tally = ledger.tally
    for name, item, value in connection.execute("SELECT name, item, value FROM counters"):
        tally.restore(name, item, value)
    recent = "SELECT a.reward FROM attempts a JOIN groups g ON g.group_id = a.group_id WHERE g.split = 'train' AND "
    recent += "a.state IN ('accepted', 'consumed') ORDER BY a.rowid DESC LIMIT ?"
    tally.recent.extend(reversed([reward for (reward,) in connection.execute(recent, (tally.recent.maxlen,))]))
    kept = ", ".join(f"'{state.value}'" for state in sorted(LIVE | {State.ACCEPTED}))
    latest = f"SELECT attempt_id, state, cause FROM attempts WHERE state NOT IN ({kept}) ORDER BY rowid DESC LIMIT ?"
    for attempt_id, state, cause in reversed(connection.execute(latest, (_ENDED_REMEMBERED,)).fetchall()):
        reason = state if state == State.CONSUMED else str(cause).partition(":")[2] or str(cause)
        ledger.remember_ended(attempt_id, reason)


# ---------------------------------------------------------------- rows → objects


def _parse(text: str | None) -> PolicyVersion | None:
    return None if text is None else PolicyVersion.parse(text)


def _group(row: dict[str, Any]) -> Group:
    return Group(
        group_id=row["group_id"],
        seq=row["seq"],
        split=row["split"],
        task=Task(row["task_id"], row["task_dir"]),
        created_at=row["created_at"],
        min_step=row["min_step"],
        eval_version=_parse(row["eval_version"]),
        state=row["state"],
        consumed_step=row["consumed_step"],
        redraws=row["redraws"],
        head=row["head"],
        baseline=json.loads(row["baseline"]),
    )


def _attempt(row: dict[str, Any], rollout: Rollout) -> Attempt:
    same = {name: row[name] for name in TABLES["attempts"].names if name not in _CONVERTED}
    return Attempt(
        rollout=rollout,
        version=PolicyVersion.parse(row["policy_version"]),
        state=State(row["state"]),
        lease_until=0.0,
        rewards=json.loads(row["rewards"]),
        oldest_version=_parse(row["oldest_version"]),
        newest_version=_parse(row["newest_version"]),
        **same,
    )


_CONVERTED = frozenset(
    {"rollout_id", "group_id", "policy_version", "state", "rewards", "oldest_version", "newest_version"}
)


def _version(row: dict[str, Any]) -> Version:
    row["version"] = PolicyVersion.parse(row["version"])
    row["ready"], row["refused"] = json.loads(row["ready"]), json.loads(row["refused"])
    return Version(**row)


def _replica(row: dict[str, Any], now: float) -> Replica:
    row["version"], row["target"] = _parse(row["version"]), _parse(row["target"])
    row["state"] = ReplicaState(row["state"])
    return Replica(**row, draining_since=now)


def _eval(row: dict[str, Any]) -> EvalRun:
    row["version"], row["cancelled"] = PolicyVersion.parse(row["version"]), bool(row["cancelled"])
    return EvalRun(**row)
