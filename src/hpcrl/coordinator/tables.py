"""The tables of ``coordinator.db`` and how live objects become their rows. Both the store and restoring read this one list.

``transitions`` is the history of every attempt, ``rejections`` what came too late; ``counters`` are the sums a status shows, so that a
restart adds up nothing; the other tables hold the present state. Versions are written ``L.S``. A change of any column is a new
``SCHEMA_VERSION`` and an entry in ``migrations.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from hpcrl.coordinator.entities import Attempt, EvalRun, Group, Replica, Rollout, Version
from hpcrl.protocol.states import State
from hpcrl.protocol.version import PolicyVersion

__all__ = [
    "INDEXES",
    "SCHEMA_VERSION",
    "TABLES",
    "Row",
    "Table",
    "attempt_row",
    "eval_row",
    "group_row",
    "replica_row",
    "rollout_row",
    "version_row",
]

SCHEMA_VERSION = 2
Row = tuple[Any, ...]
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Table:
    """``columns``: SQL declarations, space-separated name first. With a ``key`` (its columns are the first ones) rows replace their
    predecessor, else they append."""

    name: str
    columns: tuple[str, ...]
    key: str = ""
    on_conflict: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.split()[0] for column in self.columns)

    @property
    def replaces(self) -> int:
        """Number of leading columns under which a later row simply replaces an earlier one; 0 when every row counts."""
        return 0 if not self.key or self.on_conflict else len(self.key.split(","))

    @property
    def create(self) -> str:
        key = f", PRIMARY KEY ({self.key})" if self.key else ""
        return f"CREATE TABLE IF NOT EXISTS {self.name} ({', '.join(self.columns)}{key})"

    def write(self, count: int = 1) -> str:
        """The statement that writes ``count`` rows, whose values it takes one after the other."""
        row = f"({', '.join('?' * len(self.columns))})"
        text = f"INSERT INTO {self.name} ({', '.join(self.names)}) VALUES {', '.join([row] * count)}"
        if not self.key:
            return text
        update = self.on_conflict or ", ".join(
            f"{n} = excluded.{n}" for n in self.names if n not in self.key.split(", ")
        )
        return f"{text} ON CONFLICT ({self.key}) DO UPDATE SET {update}"


TABLES = {
    table.name: table
    for table in (
        Table("meta", ("key TEXT", "value TEXT"), "key"),
        Table(
            "groups",
            (
                *("group_id TEXT", "seq INTEGER", "split TEXT", "task_id TEXT", "task_dir TEXT", "created_at REAL"),
                *("min_step INTEGER", "eval_version TEXT", "state TEXT", "consumed_step INTEGER", "redraws INTEGER"),
                *("head TEXT", "baseline TEXT"),
            ),
            "group_id",
        ),
        Table(
            "rollouts",
            (
                *("rollout_id TEXT", "group_id TEXT", "idx INTEGER", "tries INTEGER", "infra_failures INTEGER"),
                *("data_failures INTEGER", "state TEXT"),
            ),
            "rollout_id",
        ),
        Table(
            "attempts",
            (
                *("attempt_id TEXT", "rollout_id TEXT", "group_id TEXT", "worker_id TEXT", "replica_id TEXT"),
                *("policy_version TEXT", "state TEXT", "cause TEXT", "leased_at REAL", "deadline_at REAL"),
                "changed_at REAL",
                *("artifact TEXT", "digest TEXT", "environment_version TEXT", "policy_failure TEXT"),
                *(
                    "scorer_id TEXT",
                    "scoring_tries INTEGER",
                    "reward REAL",
                    "rewards TEXT",
                    "verifier_version TEXT",
                    "scoring_s REAL",
                ),
                *("shard TEXT", "row INTEGER", "tokens INTEGER", "trained_tokens INTEGER"),
                *("oldest_version TEXT", "newest_version TEXT", "first_token_at REAL", "consumed_step INTEGER"),
            ),
            "attempt_id",
        ),
        Table("transitions", ("attempt_id TEXT", "from_state TEXT", "to_state TEXT", "at REAL", "cause TEXT")),
        Table(
            "consumptions",
            ("rollout_id TEXT", "attempt_id TEXT", "step INTEGER", "lag INTEGER", "times INTEGER"),
            "rollout_id",
            "times = times + 1",
        ),
        Table("counters", ("name TEXT", "item TEXT", "value INTEGER"), "name, item"),
        Table("rejections", ("attempt_id TEXT", "report TEXT", "reporter TEXT", "reason TEXT", "at REAL")),
        Table(
            "versions",
            (
                *("version TEXT", "digest TEXT", "nbytes INTEGER", "published_at REAL", "ready TEXT", "refused TEXT"),
                *("transfer_s REAL", "pause_s REAL", "publish_s REAL"),
            ),
            "version",
        ),
        Table(
            "replicas",
            ("replica_id TEXT", "base_url TEXT", "node TEXT", "version TEXT", "state TEXT", "target TEXT"),
            "replica_id",
        ),
        Table(
            "evals",
            (
                *("version TEXT", "samples INTEGER", "total INTEGER", "created_at REAL", "done INTEGER"),
                *("failed INTEGER", "reward_sum REAL", "cancelled INTEGER"),
            ),
            "version",
        ),
        Table("checkpoints", ("version TEXT", "step INTEGER", "at REAL"), "version"),
        Table("idempotency", ("key TEXT", "at REAL", "reply BLOB"), "key"),
    )
}

INDEXES = (
    # Partial: the millions of finished rows are in none of those that the running coordinator reads.
    "CREATE INDEX IF NOT EXISTS groups_live ON groups (state) WHERE state IN ('open', 'complete')",
    "CREATE INDEX IF NOT EXISTS groups_by_step ON groups (consumed_step) WHERE consumed_step IS NOT NULL",
    "CREATE INDEX IF NOT EXISTS groups_by_seq ON groups (split, seq)",
    "CREATE INDEX IF NOT EXISTS rollouts_by_group ON rollouts (group_id)",
    "CREATE INDEX IF NOT EXISTS attempts_by_group ON attempts (group_id)",
    "CREATE INDEX IF NOT EXISTS transitions_by_attempt ON transitions (attempt_id)",
    "CREATE INDEX IF NOT EXISTS rejections_by_attempt ON rejections (attempt_id)",
    "CREATE INDEX IF NOT EXISTS consumptions_by_step ON consumptions (step)",
    "CREATE INDEX IF NOT EXISTS consumptions_twice ON consumptions (times) WHERE times > 1",
    "CREATE INDEX IF NOT EXISTS idempotency_by_age ON idempotency (at)",
)


def _json(value: Any) -> str:
    return _encode(value).decode()


def _text(version: PolicyVersion | None) -> str | None:
    return None if version is None else str(version)


def group_row(group: Group) -> Row:
    return (
        *(group.group_id, group.seq, group.split, group.task.task_id, group.task.task_dir, group.created_at),
        *(group.min_step, _text(group.eval_version), group.state, group.consumed_step, group.redraws),
        *(group.head, _json(group.baseline)),
    )


def rollout_row(rollout: Rollout) -> Row:
    """The state of a rollout that has not ended is its attempt's; it is stored as pending."""
    state = rollout.state if rollout.ended else State.PENDING
    return (
        *(rollout.rollout_id, rollout.group.group_id, rollout.index, rollout.tries),
        *(rollout.infra_failures, rollout.data_failures, state.value),
    )


def attempt_row(attempt: Attempt) -> Row:
    rollout = attempt.rollout
    return (
        *(attempt.attempt_id, rollout.rollout_id, rollout.group.group_id, attempt.worker_id, attempt.replica_id),
        *(str(attempt.version), attempt.state.value, attempt.cause, attempt.leased_at, attempt.deadline_at),
        attempt.changed_at,
        *(attempt.artifact, attempt.digest, attempt.environment_version, attempt.policy_failure),
        *(
            attempt.scorer_id,
            attempt.scoring_tries,
            attempt.reward,
            _json(attempt.rewards),
            attempt.verifier_version,
        ),
        *(attempt.scoring_s, attempt.shard, attempt.row, attempt.tokens, attempt.trained_tokens),
        *(_text(attempt.oldest_version), _text(attempt.newest_version), attempt.first_token_at, attempt.consumed_step),
    )


def version_row(version: Version) -> Row:
    return (
        *(str(version.version), version.digest, version.nbytes, version.published_at),
        *(_json(version.ready), _json(version.refused)),
        *(version.transfer_s, version.pause_s, version.publish_s),
    )


def replica_row(replica: Replica) -> Row:
    version, target = _text(replica.version), _text(replica.target)
    return (replica.replica_id, replica.base_url, replica.node, version, replica.state.value, target)


def eval_row(run: EvalRun) -> Row:
    return (
        *(str(run.version), run.samples, run.total, run.created_at, run.done),
        *(run.failed, run.reward_sum, int(run.cancelled)),
    )
