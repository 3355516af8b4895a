"""Real coordinator, worker and scorer processes; the model is scripted, the test plays replica and trainer."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from fake_replica import FakeReplica, Fault, Messages, Script

from hpcrl.config import dump_config, parse_config
from hpcrl.protocol import client as calls
from hpcrl.protocol import messages as m
from hpcrl.protocol.client import Client, wait_for_endpoint
from hpcrl.protocol.keyfiles import issue_keys
from hpcrl.protocol.keys import AttemptKey, proxy_secret
from hpcrl.protocol.record import AttemptRecord
from hpcrl.protocol.rundir import RunDir
from hpcrl.protocol.states import State
from hpcrl.protocol.status import Status, StatusRequest
from hpcrl.report import collect, summarize
from hpcrl.trajectory import ShardCache

GROUP = 4
FIX = "```bash\necho right > answer\n```"
LOOK = "```bash\ncat answer\n```"


def write_task(root: Path, name: str) -> None:
    """Right when the file ``answer`` holds ``right``. Paths by environment: the process backend has no namespace."""
    task = root / name
    (task / "environment" / "files").mkdir(parents=True)
    (task / "tests").mkdir()
    (task / "task.toml").write_text('version = "1.0"\n[verifier]\ntimeout_sec = 2.0\n')
    (task / "instruction.md").write_text(f"Make the answer right ({name}).\n")
    (task / "environment" / "files" / "answer").write_text("wrong\n")
    (task / "tests" / "test.sh").write_text(
        'out="$HPCRL_MOUNT_1/reward.txt"\nif [ -e hang ]; then sleep 30; fi\nif [ -e crash ]; then exit 1; fi\n'
        'if [ "$(cat answer)" = right ]; then echo 1 > "$out"; else echo 0 > "$out"; fi\n'
    )


class World:
    """A run directory and its processes."""

    def __init__(self, root: Path, **changes: dict[str, object]) -> None:
        self.run = RunDir(root / "run-1")
        self.run.create()
        for name in ("t0", "t1", "t2"):
            write_task(root / "tasks", name)
        data: dict[str, dict[str, object]] = {
            "model": {"path": "unused"},
            "tasks": {"train": str(root / "tasks")},
            "rollout": {"group_size": GROUP, "max_turns": 2, "attempt_timeout_s": 20},
            "trainer": {"groups_per_step": 2, "steps": 5},
            "sandbox": {"backend": "process"},
            "coordinator": {"lease_s": 2.0, "heartbeat_s": 0.3},
            "worker": {"concurrency": 6, "seal_every": 4, "seal_after_s": 0.2},
            "scoring": {"concurrency": 3},
            "inference": {"request_timeout_s": 3.0},
        }
        for section, values in changes.items():
            data.setdefault(section, {}).update(values)
        self.config = parse_config(data)
        self.run.config.write_text(dump_config(self.config))
        issue_keys(self.run)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        # Run by root, containers are an ordinary user's, who cannot pass pytest's private directories.
        self.scratch = Path(tempfile.mkdtemp(prefix="hpcrl-test-"))
        self.scratch.chmod(0o711)
        self.left: list[str] = []
        self.environment = {**os.environ, "HPCRL_SCRATCH": str(self.scratch)}

    def start(self, role: str, *args: str) -> None:
        command = [sys.executable, "-m", f"hpcrl.run.{role}", "--run-dir", str(self.run.root), *args]
        log = open(self.run.root / f"{role}.log", "ab")  # noqa: SIM115 - the child keeps it
        name = " ".join((role, *args))
        self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)

    def log(self, role: str) -> str:
        return (self.run.root / f"{role}.log").read_text()

    def serve(self, replica: FakeReplica, version: str = "0.0") -> None:
        inference, trainer = Client(self.run, "inference"), Client(self.run, "trainer")
        name = replica.replica_id
        inference.call(calls.REGISTER, m.ReplicaRegister(replica_id=name, base_url=replica.base_url, node="n1"))
        trainer.call(calls.START, m.TrainerStart())
        trainer.call(calls.PUBLISHED, m.VersionPublished(version=version, digest="d", nbytes=1))
        while not inference.call(calls.FLIP, m.FlipRequest(replica_id=name, version=version, wait_s=1)).granted:
            pass
        inference.call(
            calls.READY,
            m.ReplicaReady(replica_id=name, version=version, digest="d", transfer_s=0, verify_s=0, pause_s=0),
        )

    def batch(self, version: str = "0.0", patience_s: float = 60.0) -> list[m.BatchGroup]:
        trainer, deadline = Client(self.run, "trainer"), time.monotonic() + patience_s
        while time.monotonic() < deadline:
            groups = trainer.call(calls.BATCH, m.BatchRequest(version=version, wait_s=1.0)).groups
            if groups is not None:
                return groups
        raise AssertionError(
            f"no batch; worker log:\n{self.log('worker')[-3000:]}\nscorer log:\n{self.log('scorer')[-3000:]}"
        )

    def status(self) -> Status:
        return Client(self.run, "admin").call(calls.STATUS, StatusRequest())

    def finish(self) -> None:
        """The run is over: workers and scorers end by themselves, with code 0."""
        Client(self.run, "admin").call(calls.FINISH, m.Finish())
        for name, process in self.processes.items():
            if not name.startswith("coordinator"):
                assert process.wait(20) == 0, self.log(name.split()[0])

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            process.wait(20)
        deadline = time.monotonic() + 10
        while self.leftovers() and time.monotonic() < deadline:  # a killed worker's guard sweeps a moment later
            time.sleep(0.1)
        self.left = self.leftovers()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def leftovers(self) -> list[str]:
        """Scratch directories of workers and scorers."""
        return [str(path) for path in self.scratch.glob("*/w-*")]


@contextmanager
def world(
    tmp_path: Path, script: Script, workers: int = 1, **changes: dict[str, object]
) -> Iterator[tuple[World, FakeReplica]]:
    made = World(tmp_path, **changes)
    with ExitStack() as stack:
        replica = stack.enter_context(FakeReplica(proxy_secret(made.run.secret()), "r0", script))
        stack.callback(made.close)
        made.start("coordinator")
        wait_for_endpoint(made.run, "coordinator", 30.0)
        for index in range(workers):
            made.start("worker", "--index", str(index))
        made.start("scorer", "--index", "0")
        made.serve(replica)
        yield made, replica


def even(key: AttemptKey) -> bool:
    return int(key.attempt_id.split("-r")[1].split("-")[0]) % 2 == 0


def look_then_fix(key: AttemptKey, messages: Messages) -> str:
    """Every other rollout repairs the file; all of them look first."""
    if len(messages) == 1:
        return LOOK
    assert messages[-1] == {"role": "user", "content": "wrong\n"}
    return FIX if even(key) else "I give up."


def test_from_lease_to_batch(tmp_path: Path) -> None:
    with world(tmp_path, look_then_fix) as (run, _):
        groups = run.batch()
        cache = ShardCache(run.run.root)
        assert len(groups) == 2
        for group in groups:
            assert sorted(t.reward for t in group.trajectories) == [0.0, 0.0, 1.0, 1.0]
            for ref in group.trajectories:
                trajectory = cache.read(ref.shard, ref.row)
                assert (trajectory.attempt_id, trajectory.reward) == (ref.attempt_id, ref.reward)
                assert trajectory.trained_tokens == ref.trained_tokens > 0
                sampled = bytes(trajectory.token_ids[trajectory.loss_mask == 1].tolist()).decode()
                assert sampled == LOOK + (FIX if trajectory.reward else "I give up.")
                assert trajectory.environment_version and trajectory.verifier_version
                assert {"sandbox_start", "model", "commands", "scoring", "score_wait"} <= set(trajectory.timings)
        run.finish()
        status = run.status()
        assert status.duplicates == 0 and status.failures == {} and status.rejected_reports == {}
        summary = summarize(collect(run.run.root))
        assert summary["tokens_generated"] > 0
        # Sandboxes of attempts and of scorings; the first of each kind cannot have been foreseen.
        assert summary["pool_misses"] > 0 and summary["pool_hits"] + summary["pool_misses"] >= 4 * GROUP
    assert not list(run.run.shards.glob("*.partial"))
    assert run.left == []


def test_infrastructure_failures_are_tried_again(tmp_path: Path) -> None:
    seen: set[str] = set()

    def script(key: AttemptKey, messages: Messages) -> str | Fault:
        rollout, attempt = key.attempt_id.rsplit("-", 1)
        if attempt == "a0" and rollout.endswith("-r0"):
            return Fault(status=503)
        if attempt == "a0" and rollout.endswith("-r1") and len(messages) > 1:
            seen.add(rollout)
            return Fault(status=409, code="stale_version")
        return FIX

    with world(tmp_path, script) as (run, _):
        groups = run.batch()
        assert all(len(group.trajectories) == GROUP for group in groups)
        assert {t.reward for group in groups for t in group.trajectories} == {1.0}
        failures = run.status().failures
        assert failures["infra:model_unavailable"] >= 2 and failures["infra:stale_version"] >= 2
        assert seen


def test_policy_failures_are_scored_and_verifier_crashes_are_not(tmp_path: Path) -> None:
    def script(key: AttemptKey, messages: Messages) -> str | Fault:
        rollout, attempt = key.attempt_id.rsplit("-", 1)
        if rollout.endswith("-r0"):  # fills its disk
            return "```bash\nfor i in 1 2 3; do head -c 900000 /dev/zero > big$i; done; sleep 5\n```"
        if rollout.endswith("-r1"):  # makes the verifier hang
            return "```bash\ntouch hang\n```"
        if rollout.endswith("-r2") and attempt == "a0":  # no reward is written: the verifier's failure
            return "```bash\ntouch crash\n```"
        return FIX if len(messages) == 1 else Fault(status=400, code="context_length_exceeded")

    with world(tmp_path, script, sandbox={"disk_mib": 1}) as (run, _):
        groups = run.batch()
        cache = ShardCache(run.run.root)
        for group in groups:
            by_rollout = {ref.rollout_id[-2:]: (ref, cache.read(ref.shard, ref.row)) for ref in group.trajectories}
            assert by_rollout["r0"][0].reward == 0.0 and by_rollout["r0"][1].policy_failure == "disk_limit"
            assert by_rollout["r1"][0].reward == 0.0
            assert by_rollout["r2"][0].reward == 1.0 and by_rollout["r2"][0].attempt_id.endswith("-a1")
            assert by_rollout["r3"][0].reward == 1.0 and by_rollout["r3"][1].policy_failure == "truncated"
        assert run.status().failures["infra:no_reward"] >= 2


def test_an_incomplete_record_is_a_data_failure(tmp_path: Path) -> None:
    def spoil(record: AttemptRecord) -> AttemptRecord:
        if not record.attempt_id.endswith("-a0"):
            return record
        if "-r0-" in record.attempt_id:
            return record.model_copy(update={"logprobs": record.logprobs[:-1]})
        return record.model_copy(update={"requests": record.requests[:-1]}) if "-r1-" in record.attempt_id else record

    with world(tmp_path, look_then_fix) as (run, replica):
        replica.spoiled = spoil
        run.batch()
        failures = run.status().failures
        assert failures["data:length_mismatch"] >= 1 and failures["data:record_incomplete"] >= 1


def test_a_killed_worker_costs_its_attempts_only(tmp_path: Path) -> None:
    def script(key: AttemptKey, messages: Messages) -> str | Fault:
        return "```bash\nsleep 0.3; echo right > answer\n```" if len(messages) == 1 else "done"

    with world(tmp_path, script, workers=2) as (run, replica):
        while replica.calls < 8:
            time.sleep(0.05)
        victim = run.processes["worker --index 0"]
        victim.send_signal(signal.SIGKILL)
        groups = run.batch()
        assert {t.reward for group in groups for t in group.trajectories} == {1.0}
        status = run.status()
        assert status.failures.get("infra:lease_expired", 0) >= 1 and status.duplicates == 0
        del run.processes["worker --index 0"]
        run.finish()
    assert run.left == []


@pytest.mark.parametrize("role", ["worker", "scorer"])
def test_what_a_killed_process_held_is_free_as_soon_as_it_is_started_again(tmp_path: Path, role: str) -> None:
    def script(key: AttemptKey, messages: Messages) -> str | Fault:
        if len(messages) > 1:
            return "done"
        slow = "touch hang" if key.attempt_id.endswith("-r0-a0") else "sleep 0.3"
        return f"```bash\n{slow}; echo right > answer\n```"

    # Leases longer than the test: unless they end with the process that held them the batch never comes.
    leases = {"coordinator": {"lease_s": 600.0}, "scoring": {"lease_s": 600.0}}
    with world(tmp_path, script, **leases) as (run, _):
        deadline = time.monotonic() + 60
        state = State.RUNNING if role == "worker" else State.ARTIFACT_READY
        while not run.status().attempts.get(state) and time.monotonic() < deadline:
            time.sleep(0.02)
        killed = run.processes[f"{role} --index 0"]
        killed.kill()
        killed.wait(20)
        run.start(role, "--index", "0")
        groups = run.batch()
        assert [len(group.trajectories) for group in groups] == [GROUP, GROUP]
        status = run.status()
        assert status.duplicates == 0
        if role == "worker":
            assert status.failures.get("infra:worker_died", 0) >= 1
        run.finish()
    assert run.left == []


def test_the_coordinator_restarts_under_load(tmp_path: Path) -> None:
    with world(tmp_path, look_then_fix, workers=1) as (run, replica):
        while replica.calls < 6:
            time.sleep(0.05)
        old = run.processes.pop("coordinator")
        old.kill()
        old.wait(10)
        (run.run.endpoints / "coordinator").unlink()
        run.start("coordinator")
        groups = run.batch()
        assert all(len(group.trajectories) == GROUP for group in groups)
        assert run.status().duplicates == 0


def test_sigterm_ends_a_worker_cleanly(tmp_path: Path) -> None:
    def script(key: AttemptKey, messages: Messages) -> str | Fault:
        return "```bash\nsleep 60\n```"

    with world(tmp_path, script, sandbox={"command_timeout_s": 60.0}) as (run, replica):
        while replica.calls < 4:
            time.sleep(0.05)
        for name in ("worker --index 0", "scorer --index 0"):
            run.processes[name].terminate()
            assert run.processes[name].wait(15) == 0
        assert run.status().attempts.get(State.ARTIFACT_READY, 0) == 0
    assert run.left == []


def test_what_a_worker_held_that_has_to_go_is_taken_by_another_at_once(tmp_path: Path) -> None:
    def script(key: AttemptKey, messages: Messages) -> str | Fault:
        if len(messages) > 1:
            return "done"
        return "```bash\nsleep 0.3; echo right > answer\n```"

    # Leases longer than the test: without a last word the batch would never come.
    lease = {"lease_s": 600.0, "infra_retries": 0}
    with world(tmp_path, script, workers=2, coordinator=lease) as (run, replica):
        while replica.calls < 8:
            time.sleep(0.05)
        leaving = run.processes.pop("worker --index 0")
        leaving.terminate()
        assert leaving.wait(15) == 0
        groups = run.batch()
        assert [len(group.trajectories) for group in groups] == [GROUP, GROUP]
        status = run.status()
        assert status.cancelled["worker_left"] >= 1
        assert status.failures == {} and status.duplicates == 0
        run.finish()
    assert run.left == []


@pytest.mark.apptainer
def test_repair_tasks_in_real_containers(tmp_path: Path) -> None:
    """The quickstart's tasks: even rollouts apply the reference solution, odd ones break the file."""
    solutions = {
        (task / "instruction.md").read_text().strip(): (task / "solution" / "solve.sh").read_text().splitlines()[-1]
        for task in sorted(Path("tasks/repair/train").iterdir())
    }

    def script(key: AttemptKey, messages: Messages) -> str:
        if len(messages) == 1:
            return "```bash\ncat sol.py\n```"
        assert messages[-1]["content"].startswith("def ")
        command = solutions[messages[0]["content"]] if even(key) else "echo 'def' > sol.py"
        return f"```bash\n{command}\n```"

    with world(tmp_path, script, sandbox={"backend": "apptainer"}, tasks={"train": "tasks/repair/train"}) as (run, _):
        groups = run.batch()
        for group in groups:
            assert {t.rollout_id[-2:]: t.reward for t in group.trajectories} == {
                "r0": 1.0,
                "r1": 0.0,
                "r2": 1.0,
                "r3": 0.0,
            }
        assert run.status().failures == {}
        run.finish()
    assert run.left == []
