"""Real children, short lives: what counts as success, and which reason is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcrl.errors import EnvironmentFault
from hpcrl.launch.steps import Step
from hpcrl.launch.watcher import Child, Watcher, first_failure, is_final
from hpcrl.protocol.rundir import RunDir, publish_text

DONE = json.dumps({"steps": 3, "stopped_early": False})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    found.create()
    return found


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrl.launch.watcher._POLL_S", 0.01)
    monkeypatch.setattr("hpcrl.launch.watcher._REASON_GRACE_S", 0.05)


def shell(run: RunDir, name: str, script: str, *, ends_run: bool = False, **env: str) -> Step:
    return Step(name, ["sh", "-c", script], run.logs(name) / "log", ends_run=ends_run, env=env)


def never() -> str:
    return ""


def failure(run: RunDir, role: str, reason: str, at: float) -> None:
    publish_text(run.failures / f"{role}.json", json.dumps({"role": role, "node": "n1", "at": at, "reason": reason}))


def test_success_is_code_0_of_the_step_that_ends_the_run_and_the_trainers_last_word(run: RunDir) -> None:
    with Watcher(run) as watcher:
        watcher.start(shell(run, "worker", "sleep 60"))
        watcher.start(shell(run, "mpi", f"echo '{DONE}' > {run.trained}", ends_run=True))
        assert watcher.wait(never) == ""


def test_a_trainer_that_was_asked_to_stop_is_no_success(run: RunDir) -> None:
    early = json.dumps({"steps": 3, "stopped_early": True})
    with Watcher(run) as watcher:
        watcher.start(shell(run, "mpi", f"echo '{early}' > {run.trained}", ends_run=True))
        assert watcher.wait(never) == "the trainer was asked to stop at step 3"


def test_code_0_without_the_trainers_last_word_is_a_failure(run: RunDir) -> None:
    with Watcher(run) as watcher:
        watcher.start(shell(run, "mpi", "echo srun: nothing started >&2", ends_run=True))
        reason = watcher.wait(never)
    assert reason.startswith("mpi ended with exit code 0: srun: nothing started (log: ")


def test_another_steps_end_is_never_success(run: RunDir) -> None:
    publish_text(run.trained, DONE)
    with Watcher(run) as watcher:
        watcher.start(shell(run, "mpi", "sleep 60", ends_run=True))
        watcher.start(shell(run, "worker", "true"))
        assert watcher.wait(never).startswith("worker ended with exit code 0 (log: ")


def test_the_first_recorded_failure_is_the_reason_whoever_ended_first(run: RunDir) -> None:
    failure(run, "inference", "world of size 1", at=2.0)
    failure(run, "trainer", "out of memory", at=1.0)
    with Watcher(run) as watcher:
        watcher.start(shell(run, "mpi", "exit 3", ends_run=True))
        assert watcher.wait(never) == "trainer on n1: out of memory"


def test_a_reason_that_is_still_being_written_is_waited_for(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrl.launch.watcher._REASON_GRACE_S", 5.0)
    entry = json.dumps({"role": "trainer", "node": "n1", "at": 1, "reason": "late"})
    run.failures.mkdir()
    script = f"(sleep 0.08; printf '%s' '{entry}' > {run.root}/x; mv {run.root}/x {run.failures}/t.json) & exit 1"
    with Watcher(run) as watcher:
        watcher.start(shell(run, "mpi", script, ends_run=True))
        assert watcher.wait(never) == "trainer on n1: late"


def test_a_killed_child_is_named_with_its_signal(run: RunDir) -> None:
    with Watcher(run) as watcher:
        child = watcher.start(shell(run, "worker", "exec sleep 60"))
        os.kill(child.process.pid, signal.SIGKILL)
        reason = watcher.wait(never)
    assert reason == f"worker was killed by signal 9 (Killed) (log: {child.step.log})"


@pytest.mark.parametrize("script", ["kill -9 $$", "exit 137"])
def test_who_was_killed_is_not_asked_for_a_reason(run: RunDir, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """137 is what srun makes of a killed task. A world's srun says so too when one rank failed and wrote why."""
    monkeypatch.setattr("hpcrl.launch.watcher._REASON_GRACE_S", 1e9)
    with Watcher(run) as watcher:
        watcher.start(shell(run, "worker", script))
        assert watcher.wait(never).startswith("worker ")
    monkeypatch.setattr("hpcrl.launch.watcher._REASON_GRACE_S", 5.0)
    entry = json.dumps({"role": "trainer", "node": "n1", "at": 1, "reason": "late"})
    run.failures.mkdir()
    late = f"(sleep 0.08; printf '%s' '{entry}' > {run.root}/x; mv {run.root}/x {run.failures}/t.json) & {script}"
    with Watcher(run) as watcher:
        watcher.start(shell(run, "mpi", late, ends_run=True))
        assert watcher.wait(never) == "trainer on n1: late"


def test_a_real_time_signal_has_a_readable_end(run: RunDir) -> None:
    with Watcher(run) as watcher:
        child = watcher.start(shell(run, "worker", "exec sleep 60"))
        os.kill(child.process.pid, signal.SIGRTMIN + 3)
        child.process.wait()
        assert child.ended().startswith(f"was killed by signal {signal.SIGRTMIN + 3}")


def test_without_a_recorded_reason_the_last_line_of_the_log_is_told(run: RunDir) -> None:
    with Watcher(run) as watcher:
        watcher.start(shell(run, "mpi", "echo first; echo; echo 'srun: error: Unable to create step'; echo; exit 1"))
        assert watcher.wait(never).startswith("mpi ended with exit code 1: srun: error: Unable to create step (log: ")


def test_what_a_dying_library_said_in_a_tasks_log_is_told_too(run: RunDir) -> None:
    folder = run.logs("trainer")
    folder.mkdir(parents=True)
    (folder / "0.log").write_text("all is well\n")
    (folder / "1.log").write_text("loading\nFatal error in internal_Init: Other MPI error\nstack\n\n")
    step = Step(
        "mpi", ["sh", "-c", "echo 'srun: tasks 0-1 failed'; exit 15"], run.logs("launcher") / "x", True, (folder,)
    )
    with Watcher(run) as watcher:
        watcher.start(step)
        reason = watcher.wait(never)
    said = "mpi ended with exit code 15: srun: tasks 0-1 failed; trainer/1.log: Fatal error in internal_Init: Other MPI error"
    assert reason.startswith(said)


def test_sruns_first_error_is_told_and_not_how_it_stopped_the_others(run: RunDir) -> None:
    folder = run.logs("worker")
    folder.mkdir(parents=True)
    (folder / "0.log").write_text("slurmstepd-cpu1: error: *** STEP 3.4 ON cpu1 CANCELLED\n")
    log = run.logs("launcher") / "worker.log"
    log.parent.mkdir(parents=True)
    log.write_text("srun: error: of an earlier launch\n")
    says = "printf 'srun: error: cpu1: task 0: Killed\nsrun: error: cpu2: task 1: Terminated\nsrun: Force Terminated\n'"
    with Watcher(run) as watcher:
        watcher.start(Step("worker", ["sh", "-c", f"{says}; exit 137"], log, folders=(folder,)))
        reason = watcher.wait(never)
    assert reason == f"worker ended with exit code 137: srun: error: cpu1: task 0: Killed (log: {log})"


def test_an_interruption_is_the_reason(run: RunDir) -> None:
    asked = iter(["", "", "stopped by SIGTERM"])
    with Watcher(run) as watcher:
        watcher.start(shell(run, "mpi", "sleep 60", ends_run=True))
        assert watcher.wait(lambda: next(asked)) == "stopped by SIGTERM"


def test_nothing_survives_the_watcher_not_even_the_deaf(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrl.launch.watcher._TERM_GRACE_S", 0.05)
    with Watcher(run) as watcher:
        children = [
            watcher.start(shell(run, "plain", "sleep 60")),
            watcher.start(shell(run, "deaf", "trap '' TERM; while :; do sleep 0.01; done")),
        ]
    assert [child.process.poll() is not None for child in children] == [True, True]
    assert all(_gone(child) for child in children)


def test_what_a_child_leaves_in_its_group_is_killed_with_it(run: RunDir) -> None:
    with Watcher(run) as watcher:
        child = watcher.start(shell(run, "parent", f"(trap '' TERM; touch {run.root}/ready; sleep 60) & wait"))
        while not (run.root / "ready").exists():
            time.sleep(0.005)
    assert _gone(child)


def test_children_get_the_steps_environment_log_and_folders(run: RunDir, tmp_path: Path) -> None:
    step = Step(
        "x", ["sh", "-c", "echo $MINE"], run.logs("x") / "log", folders=(tmp_path / "a" / "b",), env={"MINE": "7"}
    )
    step.log.parent.mkdir(parents=True)
    step.log.write_text("earlier\n")
    with Watcher(run) as watcher:
        watcher.start(step).process.wait()
    assert step.log.read_text() == "earlier\n7\n"
    assert (tmp_path / "a" / "b").is_dir()


def test_waiting_for_some_to_end_by_themselves(run: RunDir) -> None:
    with Watcher(run) as watcher:
        watcher.start(shell(run, "mpi", "sleep 60", ends_run=True))
        watcher.start(shell(run, "worker-0", "true"))
        assert watcher.wait_ended(lambda name: name.startswith("worker"), 5.0) == []
        watcher.start(shell(run, "worker-1", "sleep 60"))
        start = time.monotonic()
        assert watcher.wait_ended(lambda name: name.startswith("worker"), 0.05) == ["worker-1"]
        assert time.monotonic() - start < 1.0


def test_a_command_that_does_not_exist_is_a_readable_reason(run: RunDir) -> None:
    with (
        Watcher(run) as watcher,
        pytest.raises(EnvironmentFault, match="cannot start mpi: no-such-command-here: No such"),
    ):
        watcher.start(Step("mpi", ["no-such-command-here"], run.logs("mpi") / "log"))


def test_no_failures_no_reason(run: RunDir) -> None:
    assert first_failure(run) is None


def _gone(child: Child) -> bool:
    """No process of its group is left (the dead are reaped by init a moment later)."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        try:
            os.killpg(child.process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.005)
    return False


def test_a_killed_launcher_takes_its_children_along(run: RunDir) -> None:
    launcher = """
import sys, time
from pathlib import Path
from hpcrl.launch.steps import Step
from hpcrl.launch.watcher import Watcher
from hpcrl.protocol.rundir import RunDir
run = RunDir(Path(sys.argv[1]))
child = Watcher(run).start(Step("worker", ["sleep", "60"], run.logs("worker") / "log"))
print(child.process.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", launcher, str(run.root)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        os.kill(child, 0)
        process.kill()
    deadline = time.monotonic() + 10
    while _alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_child_may_be_started_again_and_its_reason_is_put_aside(run: RunDir) -> None:
    marker, told = run.root / "second", []
    script = f"test -e {marker} && echo '{DONE}' > {run.trained} || {{ touch {marker}; exit 7; }}"
    step = Step("mpi", ["sh", "-c", script], run.logs("mpi") / "log", ends_run=True, roles=("trainer",))
    failure(run, "trainer-n1", "out of memory", at=1.0)

    def again(child: Child, reason: str) -> str:
        told.append(reason)
        watcher.restart(child)
        return ""

    with Watcher(run) as watcher:
        watcher.start(step)
        assert watcher.wait(never, again) == ""
    assert told == ["trainer-n1 on n1: out of memory"]
    assert first_failure(run) is None
    assert (run.failures / "restarted" / "trainer-n1.json").exists()


def test_what_would_fail_again_in_the_same_way_is_final(run: RunDir) -> None:
    entry = {"role": "worker", "node": "n1", "at": 1.0, "reason": "r"}
    publish_text(run.failures / "a.json", json.dumps(entry))
    assert not is_final(run)
    publish_text(run.failures / "a.json", json.dumps({**entry, "exit_code": 3}))
    assert is_final(run)
