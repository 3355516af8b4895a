"""``hpcrl status rollout ID``: the life of one rollout, asked of the coordinator, or read from the database of a run that has none."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hpcrl.errors import UserError
from hpcrl.protocol import client as api
from hpcrl.protocol.client import CoordinatorGone
from hpcrl.protocol.history import HistoryRequest, RolloutHistory
from hpcrl.protocol.rundir import RunDir

__all__ = ["newest_run", "show_history"]

_RUNS = Path("runs")


def newest_run() -> RunDir:
    """The run under ``runs/`` whose database was written last. Raises UserError when there is none."""
    found = max(_RUNS.glob("*/coordinator.db"), key=lambda path: path.stat().st_mtime, default=None)
    if found is None:
        raise UserError(f"no run under {_RUNS.resolve()}: name one with --run-dir RUN_DIR")
    return RunDir(found.parent)


def show_history(run: RunDir, rollout: str, as_json: bool) -> None:
    """Print it. Raises UserError for an unknown rollout."""
    history = _asked(run, rollout) or _read(run, rollout)
    console = Console(width=None if Console().is_terminal else 200)
    if as_json:
        console.print_json(history.model_dump_json())
        return
    console.print(
        f"{run.run_id}: rollout {history.rollout_id} of task {history.task_id} ({history.split}): {history.state.value}, "
        f"{len(history.attempts)} attempts, {history.infra_failures} infra and {history.data_failures} data failures"
    )
    attempts = Table("attempt", "state", "worker", "scorer", "replica", "version", "reward", "shard", "row", "step")
    for attempt in history.attempts:
        values = (attempt.state.value, attempt.worker_id, attempt.scorer_id, attempt.replica_id, attempt.policy_version)
        place = (
            attempt.reward,
            Path(attempt.shard).name,
            attempt.row if attempt.shard else None,
            attempt.consumed_step,
        )
        attempts.add_row(attempt.attempt_id, *("" if value is None else str(value) for value in (*values, *place)))
    console.print(attempts)
    events = Table("time", "attempt", "what", "cause")
    for event in history.events:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at)) + f"{event.at % 1:.3f}"[1:]
        events.add_row(at, event.attempt_id, event.what, event.cause + (f" (from {event.by})" if event.by else ""))
    console.print(events)


def _asked(run: RunDir, rollout: str) -> RolloutHistory | None:
    """From the coordinator; None when there is none to ask."""
    if run.endpoint("coordinator") is None or run.end.exists():
        return None
    client = api.Client(run, "admin", patience_s=2.0)
    try:
        return client.call(api.HISTORY, HistoryRequest(rollout_id=rollout))
    except CoordinatorGone:
        return None
    finally:
        client.close()


def _read(run: RunDir, rollout: str) -> RolloutHistory:
    from hpcrl.coordinator.database import open_for_reading
    from hpcrl.coordinator.history import rollout_history

    connection = open_for_reading(run.database)
    try:
        history = rollout_history(connection, rollout)
    finally:
        connection.close()
    if history is None:
        raise UserError(
            f"no rollout {rollout} in {run.database}: ids look like g000012-r3 (training) or e0.5-2-r0 (evaluation)"
        )
    return history
