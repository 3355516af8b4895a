"""A worker that was stopped past its lease goes on and reports: too late, without effect, and for everybody to see."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_coordinator import Coordinator, Roles, coordinator  # noqa: F401 - the fixture
from typer.testing import CliRunner

from hpcrl.cli.main import app
from hpcrl.protocol import client as c
from hpcrl.protocol.history import HistoryRequest
from hpcrl.protocol.states import State

WORKER = """
import json, sys
from pathlib import Path
from hpcrl.protocol import client as c, messages as m
from hpcrl.protocol.rundir import RunDir
client = c.Client(RunDir(Path(sys.argv[1])), "worker")
[lease] = client.call(c.LEASE, m.LeaseRequest(worker_id="slow", n=1)).leases
print(lease.attempt_id, flush=True)
sys.stdin.readline()
item = m.ArtifactItem(attempt_id=lease.attempt_id, artifact="a", digest="d", environment_version="e")
print(client.call(c.ARTIFACT, m.ArtifactReport(worker_id="slow", items=[item])).model_dump_json(), flush=True)
"""


def test_a_worker_stopped_past_its_lease_reports_in_vain(coordinator: Coordinator) -> None:  # noqa: F811
    coordinator.end(signal.SIGTERM)
    text = coordinator.run.config.read_text()
    coordinator.run.config.write_text(
        text.replace("lease_s: 20.0", "lease_s: 0.5").replace("heartbeat_s: 5.0", "heartbeat_s: 0.1")
    )
    coordinator.start()
    roles = Roles(coordinator.run)
    roles.begin()
    command = [sys.executable, "-c", WORKER, str(coordinator.run.root)]
    slow = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert slow.stdin is not None and slow.stdout is not None
    first = slow.stdout.readline().strip()
    slow.send_signal(signal.SIGSTOP)
    rollout = first.removesuffix("-a0")
    deadline = time.monotonic() + 60
    second = None
    while second is None and time.monotonic() < deadline:
        second = next((lease for lease in roles.lease(8) if lease.rollout_id == rollout), None)
    assert second is not None and second.attempt_id == f"{rollout}-a1"
    assert roles.artifact([second]).accepted == [second.attempt_id]
    roles.score(8)
    assert roles.seal([second]).accepted == [second.attempt_id]
    slow.send_signal(signal.SIGCONT)
    slow.stdin.write("report\n")
    slow.stdin.flush()
    ack = json.loads(slow.stdout.readline())
    assert slow.wait(20) == 0
    assert ack == {"accepted": [], "rejected": {first: "lease_expired"}}
    assert roles.status().rejected_reports == {"lease_expired": 1}
    history = roles.admin.call(c.HISTORY, HistoryRequest(rollout_id=rollout))
    assert history.state is State.ACCEPTED
    assert [(e.attempt_id, e.what, e.cause, e.by) for e in history.events if "rejected" in e.what] == [
        (first, "artifact report rejected", "lease_expired", "slow")
    ]
    shown = CliRunner().invoke(app, ["status", "rollout", rollout, "--run-dir", str(coordinator.run.root)])
    assert shown.exit_code == 0 and "artifact report rejected" in shown.stdout
    coordinator.end(signal.SIGTERM)
    checked = CliRunner().invoke(app, ["db", "check", str(coordinator.run.root)])
    assert checked.exit_code == 0, checked.stdout


@pytest.mark.parametrize("argv", [["db", "check"], ["status", "rollout", "g000000-r0", "--run-dir"]])
def test_a_run_without_a_database_is_one_line(tmp_path: Path, argv: list[str]) -> None:
    (tmp_path / "config.resolved.yaml").touch()
    result = CliRunner().invoke(app, [*argv, str(tmp_path)])
    assert result.exit_code == 2 and "the run has not begun" in result.stderr
