"""The command line: refusals are one line and an exit code; nothing heavy is loaded; following ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from hpcrl.cli import follow as following
from hpcrl.cli.follow import describe, follow, lost_job
from hpcrl.cli.main import app
from hpcrl.errors import InfraError, RunError
from hpcrl.protocol import messages as m
from hpcrl.protocol.rundir import RunDir, publish_text
from hpcrl.protocol.status import Status

RUNNER = CliRunner()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "r")
    found.create()
    publish_text(found.config, yaml.safe_dump({"model": {"path": "m"}, "tasks": {"train": "t"}}))
    return found


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(following, "_POLL_S", 0.01)
    monkeypatch.setattr(following, "_LOST_S", 0.0)
    monkeypatch.setattr(following, "_SUMMARY_S", 0.1)
    yield


def end(run: RunDir, state: str, reason: str = "") -> str:
    text = json.dumps({"state": state, "reason": reason, "started_at": 1.0, "ended_at": 2.0})
    publish_text(run.end, text)
    return text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run"], "give either a configuration or --resume RUN_DIR"),
        (["run", "x.yaml", "--resume", "r"], "give either a configuration or --resume RUN_DIR"),
        (["run", "x.yaml", "--launcher", "cloud"], "--launcher cloud: allowed are local and slurm"),
        (["run", "/nowhere/x.yaml"], "cannot read the configuration /nowhere/x.yaml: No such file or directory"),
        (["run", "--resume", "/nowhere/r"], "--resume /nowhere/r: no run there"),
        (["submit", "/nowhere/x.yaml"], "cannot read the configuration /nowhere/x.yaml"),
        (
            ["status", "/nowhere/r"],
            "/nowhere/r holds no run (config.resolved.yaml is missing); a submitted run writes it when",
        ),
        (["status", "/nowhere/r", "--follow", "--json"], "--follow and --json exclude each other"),
        (["report", "/nowhere/r"], "/nowhere/r holds no run"),
        (["shards", "ls", "/nowhere/r"], "/nowhere/r is neither a shard nor a directory"),
        (["tasks", "check", "/nowhere/t"], "/nowhere/t"),
        (["devcluster", "up", "--layout", "/nowhere/l.yaml"], "/nowhere/l.yaml"),
        (["devcluster", "exec", "--name", "none-such", "--", "true"], "cluster none-such does not exist"),
    ],
)
def test_a_refusal_is_one_line_and_code_2_or_3(argv: list[str], message: str) -> None:
    result = RUNNER.invoke(app, argv)
    assert result.exit_code in (2, 3)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("hpcrl: ")
    assert message in lines[0]


@pytest.mark.parametrize(
    "argv", [[], ["run"], ["submit"], ["status"], ["shards"], ["tasks"], ["devcluster"], ["doctor"]]
)
def test_help_answers(argv: list[str]) -> None:
    assert RUNNER.invoke(app, [*argv, "--help"]).exit_code == 0


def test_the_command_line_loads_nothing_heavy() -> None:
    code = "import sys, hpcrl.cli.main; print(sorted({'torch', 'vllm', 'mpi4py', 'transformers', 'submitit'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_used_run_directory_is_refused_before_anything_is_submitted(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, task = tmp_path / "model", tmp_path / "tasks" / "one"
    (task / "tests").mkdir(parents=True)
    model.mkdir()
    names = ("config.json", "m.safetensors", "tokenizer.json", "chat_template.jinja")
    for path in (*(model / name for name in names), task / "tests" / "test.sh"):
        path.write_text('{"model_type": "qwen3"}')
    (task / "task.toml").write_text("")
    (task / "instruction.md").write_text("Do it.")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"model": {"path": str(model)}, "tasks": {"train": str(task.parent)}}))
    submitted: list[object] = []
    monkeypatch.setattr("hpcrl.launch.slurm.Slurm.submit", submitted.append)
    result = RUNNER.invoke(app, ["submit", str(path), "--run-dir", str(run.root)])
    assert result.exit_code == 2
    assert "already holds a run" in result.stderr
    assert not submitted


def test_status_of_a_run_that_ended(run: RunDir) -> None:
    end(run, "failed", "trainer on n1: out of memory")
    result = RUNNER.invoke(app, ["status", str(run.root)])
    assert result.exit_code == 0
    assert "r: failed (trainer on n1: out of memory)" in " ".join(result.stdout.split())
    result = RUNNER.invoke(app, ["status", str(run.root), "--json"])
    assert json.loads(result.stdout)["reason"] == "trainer on n1: out of memory"


def test_status_of_a_run_whose_launcher_died(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def __init__(self, *_: object, **__: object) -> None: ...

        def call(self, *_: object) -> None:
            raise InfraError("coordinator_gone", "no answer")

        def close(self) -> None: ...

    monkeypatch.setattr("hpcrl.protocol.client.Client", Silent)
    for over, said in (
        ("job 44 ended (failed) before its run did", "44 ended .*--resume .* continues it"),
        ("", "does not answer: it is starting, .*or it was cut off .*no answer"),
    ):
        monkeypatch.setattr(following, "_noted_job", lambda _, over=over: lambda: over)
        result = RUNNER.invoke(app, ["status", str(run.root)])
        assert result.exit_code == 1
        assert re.search(said, result.stderr)


@pytest.mark.usefixtures("quick")
def test_following_ends_with_the_runs_reason(run: RunDir) -> None:
    timer = threading.Timer(0.05, end, (run, "failed", "worker was killed"))
    timer.start()
    with pytest.raises(RunError, match="the run failed: worker was killed"):
        follow(run)
    timer.join()


def test_added_workers_say_where_their_job_speaks(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrl.launch.workers.add_workers", lambda *_, **__: "44")
    monkeypatch.setattr("hpcrl.launch.submit.job_output", lambda job: Path(f"/there/slurm-{job}.out"))
    said = RUNNER.invoke(app, ["workers", "add", str(run.root)]).stdout
    assert "submitted job 44; its output: /there/slurm-44.out; end it at any time: scancel 44" in said


@pytest.mark.usefixtures("quick")
def test_following_a_run_that_was_cancelled(run: RunDir) -> None:
    end(run, "cancelled", "stopped by SIGTERM")
    with pytest.raises(RunError, match="the run was cancelled: stopped by SIGTERM"):
        follow(run)


@pytest.mark.usefixtures("quick")
def test_following_a_resume_does_not_take_the_old_end_for_its_own(run: RunDir) -> None:
    old = end(run, "failed", "old")
    timer = threading.Timer(0.05, end, (run, "success"))
    timer.start()
    follow(run, old_end=old)
    timer.join()


@pytest.mark.usefixtures("quick")
def test_following_ends_when_there_is_nothing_left_to_wait_for(run: RunDir) -> None:
    answers = iter(["", "", "job 44 ended"])
    with pytest.raises(RunError, match="job 44 ended"):
        follow(run, lambda: next(answers))


@pytest.mark.usefixtures("quick")
def test_a_requeued_run_is_followed_to_its_real_end(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    end(run, "timeout", "the time limit is near: the trainer was asked to stop at step 2")

    def goes_on() -> None:
        run.end.unlink()
        end(run, "success")

    timer = threading.Timer(0.05, goes_on)
    timer.start()
    follow(run, lambda: "")
    timer.join()
    said = " ".join(capsys.readouterr().out.split())
    assert "timeout: the time limit is near: the trainer was asked to stop at step 2; waiting for Slurm" in said


@pytest.mark.parametrize("state", ["timeout", "failed", "cancelled"])
@pytest.mark.usefixtures("quick")
def test_who_knows_only_the_run_follows_its_job_too(run: RunDir, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """A lost node is recorded as a failure, a preemption as a cancellation, until the job has started again."""
    publish_text(run.job, f"44{state}\n")
    end(run, state, "why")
    asked: list[str] = []

    def states(job_id: str) -> set[str]:
        asked.append(job_id)
        if len(asked) == 3:
            end(run, "success")
        return {"PENDING"}

    monkeypatch.setattr("hpcrl.launch.submit.job_states", states)
    monkeypatch.setattr(following.shutil, "which", lambda _: "/usr/bin/squeue")
    follow(run)
    assert asked == [f"44{state}"] * 3


@pytest.mark.usefixtures("quick")
def test_a_job_that_is_over_has_ended_its_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_text(run.job, "45\n")
    end(run, "failed", "why")
    monkeypatch.setattr("hpcrl.launch.submit.job_states", lambda _: {"FAILED"})
    monkeypatch.setattr(following.shutil, "which", lambda _: "/usr/bin/squeue")
    with pytest.raises(RunError, match="the run failed: why"):
        follow(run)


@pytest.mark.usefixtures("quick")
def test_without_slurm_the_recorded_end_counts(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_text(run.job, "46\n")
    end(run, "timeout", "why")
    monkeypatch.setattr(following.shutil, "which", lambda _: None)
    with pytest.raises(RunError, match="the run came to its time limit: why"):
        follow(run)


@pytest.mark.usefixtures("quick")
def test_a_run_that_ran_into_its_limit_for_good(run: RunDir) -> None:
    end(run, "timeout", "the time limit is near")
    answers = iter(["", "job 44 ended"])
    with pytest.raises(RunError, match="the run came to its time limit: the time limit is near"):
        follow(run, lambda: next(answers))
    with pytest.raises(RunError, match="the run came to its time limit"):
        follow(run)  # nobody to ask whether it goes on


@pytest.mark.usefixtures("quick")
def test_the_summary_is_waited_for(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where an earlier one lies there, of the run that was resumed."""
    monkeypatch.setattr(following, "_SUMMARY_S", 20.0)
    monkeypatch.setattr("hpcrl.report.summary_table", lambda summary: f"the {summary['which']} summary")
    publish_text(run.summary, json.dumps({"which": "old"}))
    os.utime(run.summary, (1.0, 1.0))
    end(run, "success")
    timer = threading.Timer(0.05, publish_text, (run.summary, json.dumps({"which": "new"})))
    timer.start()
    follow(run)
    timer.join()
    assert "the new summary" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        (None, ""),
        ({"PENDING"}, ""),
        ({"CANCELLED", "RUNNING"}, ""),
        ({"FAILED", "CANCELLED"}, "job 44 ended (cancelled, failed) before its run did: hpcrl: no components ("),
        (set(), "job 44 ended (unknown to Slurm) before its run did: hpcrl: no components ("),
    ],
)
def test_a_lost_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: set[str] | None, reason: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slurm-44.out").write_text("run directory: x\nhpcrl: no components\n\n")
    monkeypatch.setattr("hpcrl.launch.submit.job_states", lambda _: states)
    monkeypatch.setattr("hpcrl.launch.submit.job_output", lambda job_id: tmp_path / f"slurm-{job_id}.out")
    said = lost_job("44")()
    assert said.startswith(reason) if reason else said == ""


def test_a_status_on_one_line() -> None:
    status = Status(
        run_id="r",
        step=3,
        version="0.3",
        stopped=False,
        attempts={},
        rollouts={},
        failures={},
        cancelled={},
        rejected_reports={},
        replicas={},
        in_flight=5,
        accepted_unused=7,
        scoring_backlog=0,
        lag_histogram={0: 8, 2: 1},
        consumed=9,
        duplicates=0,
        eval=[m.EvalResult(version="0.0", done=4, total=4, success=0.25), m.EvalResult(version="0.3", done=1, total=4)],
        recent_reward=None,
        versions=[],
    )
    assert describe(status) == "reward – · held-out 0.0: 0.25 · lag ≤ 2 · in flight 5, ready 7 · evaluating 0.3 1/4"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"null", b"\xff\xfe"])
def test_a_damaged_end_or_summary_is_named(run: RunDir, content: bytes) -> None:
    run.end.write_bytes(content)
    for options in ([], ["--follow"]):
        result = RUNNER.invoke(app, ["status", str(run.root), *options])
        assert result.exit_code == 2 and "end.json is damaged" in result.stderr
    run.end.write_text('{"state": "success", "reason": ""}')
    run.summary.write_bytes(content)
    result = RUNNER.invoke(app, ["status", str(run.root)])
    assert result.exit_code == 2 and "summary.json is damaged" in result.stderr
