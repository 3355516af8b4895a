"""``hpcrl db check``: what must hold in ``coordinator.db``, each rule as one query that finds the rows which break it."""

from __future__ import annotations

from sqlite3 import Connection, DatabaseError

from hpcrl.protocol.states import TRANSITIONS, State

__all__ = ["RULES", "check_database", "kept_shards"]

_SHOWN = 5

_LIVE = "('leased', 'running', 'artifact_ready', 'scored')"
_KEPT = "('accepted', 'consumed')"
_LEGAL = ", ".join(f"('{old.value}', '{new.value}')" for old, allowed in TRANSITIONS.items() for new in sorted(allowed))


def _counter(name: str, counted: str) -> str:
    """Counters of ``name`` that differ from what ``counted`` (item, number) finds in the tables."""
    return (
        f"SELECT coalesce(c.item, t.item), c.value, t.n FROM (SELECT item, value FROM counters WHERE name = '{name}' AND value != 0) c "
        f"FULL JOIN ({counted}) t ON t.item = c.item WHERE c.value IS NOT t.n"
    )


RULES: dict[str, str] = {
    "a transition that the state machine does not have": (
        f"SELECT attempt_id, from_state, to_state FROM transitions WHERE (from_state, to_state) NOT IN (VALUES {_LEGAL})"
    ),
    "an attempt whose transitions do not join": (
        "SELECT attempt_id, before, from_state FROM (SELECT attempt_id, from_state, "
        "lag(to_state) OVER (PARTITION BY attempt_id ORDER BY rowid) AS before FROM transitions) "
        "WHERE coalesce(before, 'pending') != from_state"
    ),
    "an attempt whose state is not that of its last transition": (
        "SELECT a.attempt_id, a.state, t.to_state FROM attempts a LEFT JOIN (SELECT attempt_id, to_state, max(rowid) FROM transitions "
        "GROUP BY attempt_id) t ON t.attempt_id = a.attempt_id WHERE t.to_state IS NOT a.state"
    ),
    "a rollout with two attempts under way or kept": (
        f"SELECT rollout_id, count(*) FROM attempts WHERE state IN {_LIVE} OR state IN {_KEPT} GROUP BY rollout_id HAVING count(*) > 1"
    ),
    "a rollout that is kept without a kept attempt": (
        f"SELECT r.rollout_id, r.state FROM rollouts r WHERE r.state IN {_KEPT} AND NOT EXISTS (SELECT 1 FROM attempts a "
        "WHERE a.group_id = r.group_id AND a.rollout_id = r.rollout_id AND a.state = r.state)"
    ),
    "a kept attempt without score or place in a shard": (
        f"SELECT attempt_id, reward, shard, row FROM attempts WHERE state IN {_KEPT} AND (reward IS NULL OR shard = '' OR row < 0)"
    ),
    "two kept attempts in one row of a shard": (
        f"SELECT shard, row, count(*) FROM attempts WHERE state IN {_KEPT} GROUP BY shard, row HAVING count(*) > 1"
    ),
    "a rollout consumed twice": "SELECT rollout_id, times FROM consumptions WHERE times > 1",
    "a consumption of an attempt that is not consumed at that step": (
        "SELECT c.rollout_id, c.attempt_id, c.step, a.state FROM consumptions c LEFT JOIN attempts a ON a.attempt_id = c.attempt_id "
        "WHERE a.state IS NOT 'consumed' OR a.consumed_step IS NOT c.step"
    ),
    "a consumed attempt without its consumption": (
        "SELECT a.attempt_id FROM attempts a LEFT JOIN consumptions c ON c.rollout_id = a.rollout_id "
        "WHERE a.state = 'consumed' AND c.attempt_id IS NOT a.attempt_id"
    ),
    "a step of another number of groups than the others": (
        "SELECT consumed_step, count(*) FROM groups WHERE state = 'consumed' AND head IS NULL GROUP BY consumed_step "
        "HAVING count(*) != (SELECT count(*) FROM groups WHERE head IS NULL AND consumed_step = "
        "(SELECT min(consumed_step) FROM groups))"
    ),
    "a counter of attempts": _counter("attempts", "SELECT state AS item, count(*) AS n FROM attempts GROUP BY state"),
    "a counter of lags": _counter(
        "lag", "SELECT CAST(lag AS TEXT) AS item, count(*) AS n FROM consumptions GROUP BY lag"
    ),
    "a counter of failures": _counter(
        "failures",
        f"SELECT cause AS item, count(*) AS n FROM attempts WHERE state = '{State.INFRA_FAILED.value}' GROUP BY cause",
    ),
    "a counter of rejected reports": _counter(
        "rejected", "SELECT reason AS item, count(*) AS n FROM rejections GROUP BY reason"
    ),
}
"""What a broken row is called → the query that finds it."""


def kept_shards(connection: Connection) -> list[str]:
    """The shards that hold samples which are kept or were trained, as paths below the run directory, in order."""
    rows = connection.execute(f"SELECT DISTINCT shard FROM attempts WHERE state IN {_KEPT} ORDER BY shard")
    return [shard for (shard,) in rows]


def check_database(connection: Connection) -> list[str]:
    """One line per broken rule, with its first rows; empty when all is well. Reads every row: seconds per million rollouts."""
    try:
        damage = [row[0] for row in connection.execute("PRAGMA integrity_check(20)") if row[0] != "ok"]
        if damage:
            return [f"damaged file: {line}" for line in damage]
        found = []
        for name, query in RULES.items():
            rows = connection.execute(query).fetchmany(_SHOWN + 1)
            if rows:
                shown = "; ".join(", ".join(map(str, row)) for row in rows[:_SHOWN])
                found.append(f"{name}: {shown}{'; …' if len(rows) > _SHOWN else ''}")
        return found
    except DatabaseError as error:
        return [f"damaged file: {error}"]
