"""Older schemas of ``coordinator.db`` → the present one, step by step, inside the transaction that opens the database.

An entry holds the SQL that turns schema N into N + 1; tables and indexes that are new altogether are created afterwards.
"""

from __future__ import annotations

from sqlite3 import Connection

from hpcrl.coordinator.tables import SCHEMA_VERSION

__all__ = ["MIGRATIONS", "migrate"]

_COUNT = "INSERT INTO counters SELECT"

MIGRATIONS: dict[int, tuple[str, ...]] = {
    1: (
        "ALTER TABLE rollouts RENAME COLUMN failures TO infra_failures",
        "ALTER TABLE rollouts ADD COLUMN data_failures INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE groups ADD COLUMN redraws INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE groups ADD COLUMN head TEXT",
        "ALTER TABLE groups ADD COLUMN baseline TEXT NOT NULL DEFAULT '[]'",
        "ALTER TABLE attempts ADD COLUMN changed_at REAL NOT NULL DEFAULT 0",
        "UPDATE attempts SET changed_at = leased_at",
        "DROP INDEX groups_by_state",
        "CREATE TABLE counters (name TEXT, item TEXT, value INTEGER, PRIMARY KEY (name, item))",
        f"{_COUNT} 'attempts', state, count(*) FROM attempts GROUP BY state",
        f"{_COUNT} 'failures', cause, count(*) FROM attempts WHERE state = 'infra_failed' GROUP BY cause",
        f"{_COUNT} 'cancelled', cause, count(*) FROM attempts WHERE state = 'cancelled' GROUP BY cause",
        f"{_COUNT} 'rejected', reason, count(*) FROM rejections GROUP BY reason",
        f"{_COUNT} 'lag', lag, count(*) FROM consumptions GROUP BY lag",
        f"{_COUNT} 'groups', 'consumed', count(*) FROM groups WHERE state = 'consumed'",
        # The state of a rollout that has not ended is that of its live attempt.
        f"{_COUNT} 'rollouts', state, count(*) FROM (SELECT CASE WHEN r.state = 'pending' THEN coalesce((SELECT a.state "
        "FROM attempts a WHERE a.group_id = r.group_id AND a.rollout_id = r.rollout_id AND a.state IN "
        "('leased', 'running', 'artifact_ready', 'scored')), 'pending') ELSE r.state END AS state FROM rollouts r) GROUP BY state",
    ),
}


def migrate(connection: Connection, found: int) -> None:
    """Bring a database of schema ``found`` up to date; the caller holds the transaction."""
    for version in range(found, SCHEMA_VERSION):
        for statement in MIGRATIONS[version]:
            connection.execute(statement)
