"""Workers for a run that is going on: who may join, and the text and step of their jobs."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml
from fake_slurm import FakeSlurm

from hpcrl.errors import EnvironmentFault, UserError
from hpcrl.launch import workers
from hpcrl.launch.workers import RunOver, add_workers, check_joinable, worker_step, workers_script
from hpcrl.protocol.address import routable_address
from hpcrl.protocol.keyfiles import issue_keys
from hpcrl.protocol.rundir import RunDir, publish_text
from hpcrl.protocol.status import Status
from hpcrl.run.role import record_failure

ROOT = Path(__file__).parents[3]
SHIPPED = (ROOT / workers.SCRIPT).read_text()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "r")
    found.create()
    publish_text(found.config, yaml.safe_dump({"model": {"path": "m"}, "tasks": {"train": "t"}}))
    issue_keys(found)
    return found


class Answer(BaseHTTPRequestHandler):
    stopped = False

    def do_POST(self) -> None:
        # fmt: off
        status = Status(
            run_id="r", step=1, version="0.1", stopped=self.stopped, attempts={}, rollouts={}, failures={}, cancelled={},
            rejected_reports={}, replicas={}, in_flight=0, accepted_unused=0, scoring_backlog=0, lag_histogram={}, consumed=0,
            duplicates=0, eval=[], recent_reward=None, versions=[],
        )
        # fmt: on
        self.send_response(200)
        self.end_headers()
        self.wfile.write(status.model_dump_json().encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def going_on(run: RunDir) -> Iterator[type[Answer]]:
    host = routable_address()
    if host.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    handler = type("Here", (Answer,), {})
    with HTTPServer((host, 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        run.announce("coordinator", f"http://{host}:{server.server_port}")
        yield handler
        server.shutdown()
        thread.join()


def refused(run: RunDir, kind: type[Exception] = UserError) -> str:
    with pytest.raises(kind) as caught:
        check_joinable(run)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_that_is_going_on(run: RunDir, going_on: type[Answer]) -> None:
    check_joinable(run)


def test_no_run(tmp_path: Path) -> None:
    assert "holds no run that can be seen here" in refused(RunDir(tmp_path))


def test_a_run_that_has_ended_says_how(run: RunDir, going_on: type[Answer]) -> None:
    publish_text(run.end, json.dumps({"state": "failed", "reason": "no disk"}))
    assert "has ended (failed: no disk)" in refused(run, RunOver)


def test_a_run_that_is_just_ending(run: RunDir, going_on: type[Answer]) -> None:
    going_on.stopped = True
    assert "is just ending" in refused(run, RunOver)


def test_a_run_that_has_not_started(run: RunDir) -> None:
    assert "has no coordinator yet" in refused(run)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_run_on_one_machine(run: RunDir, host: str) -> None:
    run.announce("coordinator", f"http://{host}:9")
    assert "one machine alone" in refused(run)


def test_a_run_that_was_cut_off(run: RunDir) -> None:
    with socket.socket() as free:
        free.bind((routable_address(), 0))
        host, port = free.getsockname()
    if host.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    run.announce("coordinator", f"http://{host}:{port}")
    assert "nobody listens at" in refused(run, EnvironmentFault)


def test_an_address_that_cannot_be_reached(run: RunDir) -> None:
    run.announce("coordinator", "http://batch-host.invalid:9")
    message = refused(run, EnvironmentFault)
    assert "cannot reach the coordinator at http://batch-host.invalid:9" in message
    assert "HPCRL_ADDRESS" in message


def test_keys_that_others_can_read(run: RunDir, going_on: type[Answer]) -> None:
    (run.keys / "worker").chmod(0o640)
    assert "can be read by others; chmod" in refused(run)


def test_the_text_holds_sizes_and_no_key(run: RunDir) -> None:
    text = workers_script(SHIPPED, run, 4, "low", sbatch=["--qos=scavenge"])
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert directives[-3:] == ["--nodes=4", "--partition=low", "--qos=scavenge"]  # the last one counts
    assert f"set -- --run-dir {run.root}\n" in text
    secrets = [run.secret(), *(str(json.loads(path.read_text())["coordinator"]) for path in run.keys.iterdir())]
    assert not [secret for secret in secrets if secret in text]


def test_an_array_has_a_job_for_each_node(run: RunDir) -> None:
    text = workers_script(SHIPPED, run, 3, None, array=True)
    assert "#SBATCH --array=1-3\n#SBATCH --nodes=1\n" in text


@pytest.mark.parametrize(("nodes", "sbatch", "said"), [(0, [], "--nodes 0"), (1, ["--nodes=1", ":"], "one component")])
def test_what_cannot_be(run: RunDir, nodes: int, sbatch: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        workers_script(SHIPPED, run, nodes, None, sbatch=sbatch)


def test_submitted(run: RunDir, going_on: type[Answer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slurm = FakeSlurm()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EnvironmentFault, match=r"slurm/workers\.sh is not here"):
        add_workers(run.root, 1, slurm=slurm)
    monkeypatch.chdir(ROOT)
    assert add_workers(run.root, 2, "cpu", slurm=slurm) == "44"
    assert "#SBATCH --nodes=2" in slurm.texts[0]


def test_workers_go_on_when_one_of_them_dies(run: RunDir) -> None:
    step = worker_step(run, "45", 3, 2, ["--constraint=x"])
    assert {"--nodes=3", "--ntasks=6", "--kill-on-bad-exit=0", "--constraint=x"} <= set(
        step[: step.index(sys.executable)]
    )
    assert step[-4:] == ["--run-dir", str(run.root), "--job", "45"]


def test_their_failures_are_no_reason_of_the_runs(run: RunDir) -> None:
    from hpcrl.launch.watcher import first_failure

    record_failure(run, "worker", "no sandbox", 3, job="45")
    assert first_failure(run) is None
    assert [json.loads(path.read_text())["reason"] for path in (run.failures / "joined").iterdir()] == ["no sandbox"]
