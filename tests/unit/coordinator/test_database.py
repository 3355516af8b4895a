"""coordinator.db: what a check finds, what a migration keeps, what a history tells, and which file systems are refused."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from coordinator_world import Harness, make_config, make_tasks
from typer.testing import CliRunner

from hpcrl.cli.main import app
from hpcrl.coordinator import database
from hpcrl.coordinator.check import RULES, check_database
from hpcrl.coordinator.database import create_tables, open_database, open_for_reading, require_locks
from hpcrl.coordinator.history import rollout_history
from hpcrl.coordinator.queue import Queue
from hpcrl.coordinator.restore import restore
from hpcrl.coordinator.tables import SCHEMA_VERSION
from hpcrl.errors import EnvironmentFault, UserError
from hpcrl.protocol import client as c
from hpcrl.protocol import messages as m
from hpcrl.protocol.states import State
from hpcrl.protocol.status import StatusRequest

V1 = """
CREATE TABLE meta (key TEXT, value TEXT, PRIMARY KEY (key));
CREATE TABLE groups (group_id TEXT, seq INTEGER, split TEXT, task_id TEXT, task_dir TEXT, created_at REAL, min_step INTEGER,
  eval_version TEXT, state TEXT, consumed_step INTEGER, PRIMARY KEY (group_id));
CREATE TABLE rollouts (rollout_id TEXT, group_id TEXT, idx INTEGER, tries INTEGER, failures INTEGER, state TEXT,
  PRIMARY KEY (rollout_id));
CREATE TABLE attempts (attempt_id TEXT, rollout_id TEXT, group_id TEXT, worker_id TEXT, replica_id TEXT, policy_version TEXT,
  state TEXT, cause TEXT, leased_at REAL, deadline_at REAL, artifact TEXT, digest TEXT, environment_version TEXT, policy_failure TEXT,
  scorer_id TEXT, scoring_tries INTEGER, reward REAL, rewards TEXT, verifier_version TEXT, scoring_s REAL, shard TEXT,
  row INTEGER, tokens INTEGER,
  trained_tokens INTEGER, oldest_version TEXT, newest_version TEXT, first_token_at REAL, consumed_step INTEGER,
  PRIMARY KEY (attempt_id));
CREATE TABLE transitions (attempt_id TEXT, from_state TEXT, to_state TEXT, at REAL, cause TEXT);
CREATE TABLE consumptions (rollout_id TEXT, attempt_id TEXT, step INTEGER, lag INTEGER, times INTEGER, PRIMARY KEY (rollout_id));
CREATE TABLE rejections (attempt_id TEXT, report TEXT, reporter TEXT, reason TEXT, at REAL);
CREATE TABLE versions (version TEXT, digest TEXT, nbytes INTEGER, published_at REAL, ready TEXT, refused TEXT, transfer_s REAL,
  pause_s REAL, publish_s REAL, PRIMARY KEY (version));
CREATE TABLE replicas (replica_id TEXT, base_url TEXT, node TEXT, version TEXT, state TEXT, target TEXT, PRIMARY KEY (replica_id));
CREATE TABLE evals (version TEXT, samples INTEGER, total INTEGER, created_at REAL, done INTEGER, failed INTEGER, reward_sum REAL,
  cancelled INTEGER, PRIMARY KEY (version));
CREATE TABLE checkpoints (version TEXT, step INTEGER, at REAL, PRIMARY KEY (version));
CREATE TABLE idempotency (key TEXT, at REAL, reply BLOB, PRIMARY KEY (key));
CREATE INDEX groups_by_state ON groups (state);
"""


def world_with_history() -> Harness:
    """Three attempts of g000000-r0: one lost, one accepted after a late report of the first, then consumed; one group under way."""
    world = Harness(make_config(staleness={"max_policy_lag": 2}))
    world.register("r0")
    world.start()
    world.publish("0.0", "r0")
    leases = world.lease(6)
    world.tick(31)
    world.artifact(leases[0].attempt_id)
    again = world.lease(6, worker="w2")
    world.finish_attempts(again[:5], worker="w2")
    assert world.batch("0.0").groups is not None
    return world


def test_the_history_of_a_rollout_tells_times_causes_and_late_reports() -> None:
    world = world_with_history()
    history = rollout_history(world.db, "g000000-r0-a1")
    assert history is not None
    assert (history.rollout_id, history.state, history.infra_failures) == ("g000000-r0", State.CONSUMED, 1)
    assert [(a.attempt_id, a.worker_id, a.state) for a in history.attempts] == [
        ("g000000-r0-a0", "w", State.INFRA_FAILED),
        ("g000000-r0-a1", "w2", State.CONSUMED),
    ]
    assert [(event.what, event.cause) for event in history.events if event.attempt_id == "g000000-r0-a0"] == [
        ("pending → leased", ""),
        ("leased → infra_failed", "infra:lease_expired"),
        ("artifact report rejected", "lease_expired"),
    ]
    assert history.events[-1].what == "accepted → consumed" and history.events[-1].cause == "step 1"
    assert rollout_history(world.db, "g000099-r0") is None


def test_a_database_that_was_written_by_the_queue_passes_the_check() -> None:
    world = world_with_history()
    assert check_database(world.db) == []
    world.start(0)
    assert check_database(world.db) == []


@pytest.mark.parametrize(
    ("rule", "damage"),
    [
        (
            "a transition that the state machine does not have",
            "UPDATE transitions SET to_state = 'scored' WHERE to_state = 'leased'",
        ),
        ("an attempt whose transitions do not join", "DELETE FROM transitions WHERE to_state = 'artifact_ready'"),
        (
            "an attempt whose state is not that of its last transition",
            "UPDATE attempts SET state = 'scored' WHERE state = 'leased'",
        ),
        (
            "a rollout with two attempts under way or kept",
            "UPDATE attempts SET state = 'leased' WHERE state = 'infra_failed'",
        ),
        (
            "a rollout that is kept without a kept attempt",
            "UPDATE rollouts SET state = 'accepted' WHERE state = 'consumed'",
        ),
        (
            "a kept attempt without score or place in a shard",
            "UPDATE attempts SET reward = NULL WHERE state = 'consumed'",
        ),
        ("two kept attempts in one row of a shard", "UPDATE attempts SET shard = 's' WHERE state = 'consumed'"),
        ("a rollout consumed twice", "UPDATE consumptions SET times = 2 WHERE rollout_id = 'g000000-r0'"),
        ("a consumption of an attempt that is not consumed at that step", "UPDATE consumptions SET step = 7"),
        ("a consumed attempt without its consumption", "DELETE FROM consumptions WHERE rollout_id = 'g000000-r0'"),
        (
            "a step of another number of groups than the others",
            "UPDATE groups SET state = 'consumed', consumed_step = 2 WHERE group_id = 'g000002'",
        ),
        ("a counter of attempts", "UPDATE counters SET value = 9 WHERE name = 'attempts' AND item = 'leased'"),
        ("a counter of lags", "DELETE FROM counters WHERE name = 'lag'"),
        ("a counter of failures", "UPDATE counters SET value = 0 WHERE name = 'failures'"),
        ("a counter of rejected reports", "DELETE FROM rejections"),
    ],
)
def test_each_rule_of_the_check_finds_its_damage(rule: str, damage: str) -> None:
    world = world_with_history()
    world.db.execute(damage)
    assert any(line.startswith(f"{rule}: ") for line in check_database(world.db)), check_database(world.db)
    assert rule in RULES


def test_a_truncated_file_is_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    connection = sqlite3.connect(path)
    create_tables(connection)
    connection.executemany("INSERT INTO meta VALUES (?, 'x')", [(f"k{i}" * 50,) for i in range(500)])
    connection.commit()
    connection.close()
    content = path.read_bytes()
    path.write_bytes(content[:8192] + b"\0" * 8192 + content[16384:])
    assert check_database(sqlite3.connect(path))[0].startswith("damaged file")


def test_a_first_schema_is_brought_up_to_date_with_everything_in_it(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    old = sqlite3.connect(path)
    old.executescript(V1)
    old.executemany("INSERT INTO meta VALUES (?, ?)", [("schema", "1"), ("lineage", "0"), ("step", "0")])
    old.execute("INSERT INTO replicas VALUES ('r0', 'http://r0/v1', 'n', '0.0', 'up', NULL)")
    old.execute("INSERT INTO groups VALUES ('g000000', 0, 'train', 't0', '/t0', 1.0, 0, NULL, 'open', NULL)")
    old.executemany(
        "INSERT INTO rollouts VALUES (?, 'g000000', ?, ?, ?, 'pending')",
        [("g000000-r0", 0, 2, 1), ("g000000-r1", 1, 0, 0)],
    )
    for name, state, cause in (("a0", "infra_failed", "infra:node_lost"), ("a1", "leased", "")):
        values = (f"g000000-r0-{name}", "g000000-r0", "g000000", "w", "r0", "0.0", state, cause, 5.0, 99.0)
        rest = "'', '', '', NULL, NULL, 0, NULL, '{}', '', 0, '', -1, 0, 0, NULL, NULL, 0, NULL"
        old.execute(f"INSERT INTO attempts VALUES ({', '.join('?' * 10)}, {rest})", values)
        old.execute("INSERT INTO transitions VALUES (?, 'pending', 'leased', 5.0, '')", values[:1])
    old.execute("INSERT INTO transitions VALUES ('g000000-r0-a0', 'leased', 'infra_failed', 6.0, 'infra:node_lost')")
    old.commit()
    old.close()
    connection = open_database(path)
    assert check_database(connection) == []
    queue = Queue(make_config(), make_tasks(3), [], "secret")
    restore(queue, connection, 10.0)
    status = queue.status(StatusRequest(), 10.0)
    assert status.attempts == {State.LEASED: 1, State.INFRA_FAILED: 1}
    assert status.rollouts == {State.LEASED: 1, State.PENDING: 1}
    assert status.failures == {"infra:node_lost": 1}
    [attempt] = queue.ledger.attempts.values()
    assert (attempt.attempt_id, attempt.rollout.infra_failures, attempt.changed_at) == ("g000000-r0-a1", 1, 5.0)
    assert database.database_schema(connection) == SCHEMA_VERSION
    connection.close()


def test_reading_is_refused_where_there_is_nothing_or_a_coordinator(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the run has not begun"):
        open_for_reading(tmp_path / "c.db")
    writing = open_database(tmp_path / "c.db")
    with pytest.raises(EnvironmentFault, match="another coordinator"):
        open_for_reading(tmp_path / "c.db")
    writing.close()
    reading = open_for_reading(tmp_path / "c.db")
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reading.execute("DELETE FROM meta")
    reading.close()


def test_a_file_system_whose_locks_keep_nobody_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_locks(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(database, "_TRY_LOCK", "pass")  # a second process that gets the lock
    with pytest.raises(EnvironmentFault, match="does not keep a second process out"):
        require_locks(tmp_path)


def test_hot_queries_use_indexes() -> None:
    """No scan of the tables that grow with the run: a plan that says SCAN of one of them reads millions of rows."""
    world = world_with_history()
    seen: list[str] = []
    world.db.set_trace_callback(seen.append)
    world.restart()
    world.start(0)
    rollout_history(world.db, "g000000-r0")
    world.db.set_trace_callback(None)
    plans = []
    for statement in seen:
        if statement.startswith(("SELECT", "DELETE")):
            rows = world.db.execute(f"EXPLAIN QUERY PLAN {statement}").fetchall()
            plans += [(row[3], statement) for row in rows]
    scans = [(plan, statement) for plan, statement in plans if plan.startswith("SCAN")]
    fine = [f"FROM {table} " for table in ("meta", "counters", "replicas", "versions", "evals")] + [
        "LIMIT 20000",
        "LIMIT 256",
    ]
    assert [entry for entry in scans if not any(text in f"{entry[1]} " for text in fine)] == []


def test_check_and_history_from_the_command_line(tmp_path: Path) -> None:
    world = world_with_history()
    target = sqlite3.connect(tmp_path / "coordinator.db")
    world.db.backup(target)
    target.close()
    (tmp_path / "config.resolved.yaml").touch()
    runner = CliRunner()
    fine = runner.invoke(app, ["db", "check", str(tmp_path)])
    assert fine.exit_code == 0 and "0 broken" in fine.stdout
    told = runner.invoke(app, ["status", "rollout", "g000000-r0", "--run-dir", str(tmp_path)])
    assert told.exit_code == 0
    assert "lease_expired" in told.stdout and "artifact report rejected" in told.stdout
    unknown = runner.invoke(app, ["status", "rollout", "g9-r0", "--run-dir", str(tmp_path)])
    assert unknown.exit_code == 2 and "no rollout g9-r0" in unknown.stderr
    damaged = sqlite3.connect(tmp_path / "coordinator.db")
    damaged.execute("UPDATE consumptions SET times = 2")
    damaged.commit()
    damaged.close()
    bad = runner.invoke(app, ["db", "check", str(tmp_path)])
    assert bad.exit_code == 1 and "a rollout consumed twice" in bad.stdout


def test_status_says_who_waits_for_whom() -> None:
    world = Harness(make_config())
    world.register("r0")
    world.start()
    world.publish("0.0", "r0")
    leases = world.lease(4)
    world.finish_attempts(leases[:3])
    assert world.lease(1, worker="w2") == []
    assert world.batch("0.0").groups is None
    phase = m.Phase(name="tool call", since=world.now + 1)
    name = leases[3].attempt_id
    world.call(c.HEARTBEAT, m.Heartbeat(worker_id="w", attempt_ids=[name], running=[name], phases={name: phase}))
    world.tick(20)
    waits = {wait.who: wait for wait in world.status().waits}
    assert waits["trainer"].what == "batch 0.0" and waits["trainer"].since == 1000.0
    assert waits["trainer"].why == f"1 of 2 groups complete; g000001 1/2: {name} on w in tool call for 19 s"
    assert "admission: another group needs version step 1, replicas serve 0" in waits["worker w2"].why
    world.artifact(name)
    assert "waits for a scorer for 0 s" in {wait.who: wait for wait in world.status().waits}["trainer"].why
    world.score()
    world.seal(leases[3])
    assert world.batch("0.0").groups is not None
    assert "trainer" not in {wait.who for wait in world.status().waits}
