"""A database as a long run leaves it: consumed groups with rollouts, attempts, transitions and consumptions, written in bulk."""

from __future__ import annotations

from collections.abc import Iterator
from sqlite3 import Connection

from hpcrl.coordinator.tables import TABLES, Row
from hpcrl.protocol.states import State

__all__ = ["fill"]

_LIFE = (
    *(State.PENDING, State.LEASED, State.RUNNING, State.ARTIFACT_READY),
    *(State.SCORED, State.ACCEPTED, State.CONSUMED),
)
_CHUNK = 2_000


def fill(connection: Connection, rollouts: int, group_size: int, groups_per_step: int) -> None:
    """Add ``rollouts`` finished rollouts (whole groups) of lineage 0 and set the counters and the position behind them."""
    groups = rollouts // group_size
    steps = groups // groups_per_step
    groups = steps * groups_per_step
    connection.execute("PRAGMA synchronous=OFF")
    connection.execute("BEGIN")
    for start in range(0, groups, _CHUNK):
        rows: dict[str, list[Row]] = {
            name: [] for name in ("groups", "rollouts", "attempts", "transitions", "consumptions")
        }
        for seq in range(start, min(start + _CHUNK, groups)):
            for name, row in _group(seq, group_size, seq // groups_per_step + 1):
                rows[name].append(row)
        for name, new in rows.items():
            connection.executemany(TABLES[name].write(), new)
    total = groups * group_size
    counters = [("attempts", "consumed", total), ("rollouts", "consumed", total), ("lag", "0", total)]
    counters += [("groups", "consumed", groups)]
    connection.executemany(TABLES["counters"].write(), counters)
    connection.executemany(TABLES["meta"].write(), [("lineage", "0"), ("step", str(steps))])
    connection.execute("COMMIT")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _group(seq: int, size: int, step: int) -> Iterator[tuple[str, Row]]:
    group_id, at, version = f"g{seq:06d}", 1.7e9 + seq, f"0.{step - 1}"
    task = ("task-000", "/shared/tasks/task-000")
    yield "groups", (group_id, seq, "train", *task, at, 0, None, "consumed", step, 0, None, "[]")
    for index in range(size):
        rollout_id = f"{group_id}-r{index}"
        attempt_id = f"{rollout_id}-a0"
        yield "rollouts", (rollout_id, group_id, index, 1, 0, 0, "consumed")
        yield (
            "attempts",
            (
                *(
                    attempt_id,
                    rollout_id,
                    group_id,
                    "cpu1-0",
                    "r0",
                    version,
                    "consumed",
                    f"step {step}",
                    at,
                    at + 300,
                    at + 60,
                ),
                *(f"artifacts/{attempt_id}", "d" * 64, "e" * 64, None),
                *("cpu1-0", 1, float(index % 2), '{"reward": 1.0}', "v" * 64, 1.0),
                *(f"shards/cpu1-0-{seq:05d}.h5", index, 2000, 1000, version, version, at, step),
            ),
        )
        for place, state in enumerate(_LIFE[1:]):
            cause = f"step {step}" if state is State.CONSUMED else ""
            yield "transitions", (attempt_id, _LIFE[place].value, state.value, at + 10 * place, cause)
        yield "consumptions", (rollout_id, attempt_id, step, 0, 1)
