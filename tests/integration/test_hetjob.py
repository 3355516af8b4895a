"""Whole runs: the shipped script and configuration, scaled down, on a real Slurm; and the same roles without Slurm.

Real trainer and inference ranks, vLLM, Apptainer sandboxes and scorers. A start of vLLM is most of a test's time.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hetjobs import ROOT, Job, Jobs

from hpcrl.devcluster.procs import snapshot
from hpcrl.protocol import client as api
from hpcrl.protocol.rundir import RunDir
from hpcrl.protocol.status import StatusRequest
from hpcrl.sandbox.images import resolve
from hpcrl.trajectory.reader import ShardReader
from hpcrl.weights.manifest import Manifest

pytestmark = [pytest.mark.vllm, pytest.mark.apptainer, pytest.mark.mpi, pytest.mark.slow, pytest.mark.timeout(1500)]

HPCRL = Path(sys.executable).with_name("hpcrl")
MODEL = ROOT / "models/repair-qwen3"
CONFIG = "configs/quickstart.yaml"
START_S = 900.0
"""Submission to the first lease on a busy machine: two vLLM servers on two cores."""
SMALLEST = ("--ntasks-per-node=1", ":", "--nodes=1", ":", "--nodes=1")
"""Options of sbatch: one trainer, one replica, one sandbox node. Quicker to start."""


def scaled_down(folder: Path, *more: str) -> list[str]:
    """Overrides of the quickstart that make it minutes long; three held-out tasks."""
    held_out = folder / "eval"
    if not held_out.exists():
        for task in sorted((ROOT / "tasks/repair/eval").iterdir())[:3]:
            shutil.copytree(task, held_out / task.name)
    return [
        f"model.path={MODEL}",
        f"tasks.eval={held_out}",
        "trainer.steps=2",
        "trainer.groups_per_step=2",
        "eval.samples=1",
        "inference.request_timeout_s=400",  # the first call compiles; on a busy machine that takes minutes
        *more,
    ]


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def check_every_trained_trajectory(run: RunDir, groups: int) -> None:
    """Each consumed row is in its shard with scores, behaviour logprobs and a version for every sampled token."""
    with closing(sqlite3.connect(f"file:{run.database}?mode=ro", uri=True)) as database:
        query = (
            "SELECT c.attempt_id, c.step, c.times, a.shard, a.row, a.reward, a.oldest_version "
            "FROM consumptions c JOIN attempts a USING (attempt_id)"
        )
        consumed = database.execute(query).fetchall()
    # A group may lack a rollout that failed too often or came too late.
    assert len(consumed) == read(run.summary)["trajectories_trained"]
    assert groups * 2 <= len(consumed) <= groups * 8
    shards = {path: list(ShardReader(run.root / path)) for path in {row[3] for row in consumed}}
    for attempt_id, step, times, shard, row, reward, oldest in consumed:
        trajectory = shards[shard][row].validate()
        assert times == 1
        assert trajectory.attempt_id == attempt_id
        assert trajectory.reward == reward
        assert str(trajectory.oldest_version) == oldest
        assert 0 <= step - 1 - trajectory.oldest_version.step <= 2
        sampled = {int(index) for index in trajectory.loss_mask.nonzero()[0]}
        assert sampled
        assert {index for start, end, *_ in trajectory.spans.tolist() for index in range(start, end)} == sampled
        assert all(trajectory.logprobs[index] <= 0 for index in sampled)


@pytest.mark.slurm
def test_the_quickstart_as_one_het_job(jobs: Jobs) -> None:
    job = jobs.submit(CONFIG, *scaled_down(jobs.folder))
    assert job.wait(START_S + 200) == "COMPLETED", job.evidence()
    run = RunDir(job.run_dir)
    summary = read(run.summary)
    assert summary["state"] == "success"
    assert summary["steps"] == 2
    assert summary["duplicates"] == 0
    assert summary["max_lag"] <= 2
    assert summary["digests_equal"] is True
    assert summary["versions_published"] == 3
    assert [(each["version"], each["scored"], each["failed"]) for each in summary["evaluations"]] == [
        ("0.0", 3, 0),
        ("0.2", 3, 0),
    ]
    # None when no group of the first batch had rewards that differ.
    gap = summary["logprob_gap_max_lag0"]
    assert gap is None or gap <= 2e-3
    assert read(run.end)["reason"] == ""
    check_every_trained_trajectory(run, groups=4)
    assert run.report.exists()
    assert _processes_of(run) == []


@pytest.mark.slurm
def test_a_killed_worker_that_may_not_be_restarted_ends_the_run_with_one_reason_and_nothing_is_left(jobs: Jobs) -> None:
    before = jobs.on_nodes("ps", "-eo", "comm=")
    job = jobs.submit(CONFIG, *scaled_down(jobs.folder, "trainer.steps=1000", "run.restarts=0"))
    run = RunDir(job.run_dir)
    job.wait_for(lambda: any(run.shards.glob("*.h5")), START_S, "shard")
    victim = next(pid for pid, argv in _processes_of(run) if "hpcrl.run.worker" in argv and "srun" not in argv)
    os.kill(victim, signal.SIGKILL)
    assert job.wait(120) == "FAILED", job.evidence()
    end = read(run.end)
    assert end["state"] == "failed"
    assert end["reason"].startswith(
        ("worker-0 ended with exit code 137: srun: error: cpu", "worker-1 ended with exit code 137: srun: error: cpu")
    )
    assert "Killed" in end["reason"]
    assert job.last_line() == f"hpcrl: {end['reason']}"
    assert read(run.summary)["state"] == "failed"
    _check_nothing_left(jobs, job, before)


@pytest.mark.slurm
def test_a_launcher_that_is_killed_ends_the_job_and_nothing_is_left(jobs: Jobs) -> None:
    """kill -9: no handler runs, so the kernel, Slurm and the guards of the roles must do it all."""
    before = jobs.on_nodes("ps", "-eo", "comm=")
    job = jobs.submit(CONFIG, *scaled_down(jobs.folder, "trainer.steps=1000"), sbatch=SMALLEST)
    run = RunDir(job.run_dir)
    job.wait_for(lambda: any(run.shards.glob("*.h5")), START_S, "shard")
    os.kill(next(pid for pid, argv in _processes_of(run) if "hpcrl.launch.batch" in argv), signal.SIGKILL)
    assert job.wait(120) == "FAILED", job.evidence()
    _check_nothing_left(jobs, job, before)
    assert jobs.on_nodes("sh", "-c", "ls -d /tmp/hpcrl-*/w-* 2>/dev/null || true") == dict.fromkeys(before, "")


@pytest.mark.slurm
def test_a_cancelled_run_whose_attempts_all_fail_records_its_end(jobs: Jobs) -> None:
    """The image goes away after it was checked: sandboxes fail as fast as they are asked for, and everybody is busy."""
    image = jobs.folder / "image"
    jobs.folder.chmod(0o711)  # run by root, sandboxes are another user
    # Not shutil.copytree: it would read the image's devices to their end.
    subprocess.run(["cp", "-a", str(resolve(str(ROOT / "containers/sandbox.def")).path), str(image)], check=True)
    sets = scaled_down(jobs.folder, "trainer.steps=1000", f"sandbox.image={image}")
    job = jobs.submit(CONFIG, *sets, sbatch=SMALLEST)
    run = RunDir(job.run_dir)
    job.wait_for(lambda: any(run.shards.glob("*.h5")), START_S, "shard")
    image.rename(jobs.folder / "gone")

    with closing(api.Client(run, "admin")) as client:

        def failing() -> bool:
            return sum(client.call(api.STATUS, StatusRequest()).failures.values()) > 200

        job.wait_for(failing, START_S, "loop of failures")
    jobs.slurm("scancel", job.job_id)
    assert job.wait(120) == "CANCELLED", job.evidence()
    end = read(run.end)
    assert (end["state"], end["reason"]) == ("cancelled", "stopped by SIGTERM")


def _check_nothing_left(jobs: Jobs, job: Job, before: dict[str, str]) -> None:
    job.wait_for(lambda: jobs.slurm("squeue", "-h") == "", 60, "end of the epilog", fails_with_job=False)
    assert _processes_of(RunDir(job.run_dir)) == []

    def left() -> dict[str, list[str]]:
        now = jobs.on_nodes("ps", "-eo", "comm=")
        return {node: names for node in now if (names := sorted(set(now[node].split()) - set(before[node].split())))}

    # Slurm's own slurmstepd stays a moment longer than its job.
    job.wait_for(lambda: not left(), 30, "end of all processes", fails_with_job=False)
    # What MPICH and vLLM keep there when they are killed is small, and not hpcrl's to remove.
    assert jobs.on_nodes("sh", "-c", "ls /dev/shm | grep hpcrl || true") == dict.fromkeys(before, "")


def _processes_of(run: RunDir) -> list[tuple[int, str]]:
    """Processes on the whole machine whose command line names the run directory."""
    found = []
    for proc in snapshot():
        try:
            argv = Path(f"/proc/{proc.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(run.root) in argv:
            found.append((proc.pid, argv))
    return found


# ---------------------------------------------------------------- without Slurm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("local")


def local(*argv: str) -> str:
    """``hpcrl run`` here; its output. The whole process group goes when it takes too long."""
    with subprocess.Popen(
        [str(HPCRL), "run", *argv],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=START_S + 200)
        except BaseException:
            process.terminate()  # the launcher stops its children
            process.wait(60)
            raise
    assert process.returncode == 0, output
    return output


@pytest.mark.parametrize("mode", ["pin=turn", "pin=token", "slots=2"])
def test_a_local_run_whose_replica_changes_versions_under_its_attempts(folder: Path, mode: str) -> None:
    root = folder / mode
    small = ("trainer.ranks=1", "inference.replicas=1", "trainer.steps=3", f"weights.{mode}")
    sets = [part for item in scaled_down(folder, *small) for part in ("--set", item)]
    local(CONFIG, "--launcher", "local", "--run-dir", str(root), *sets)
    run = RunDir(root)
    summary = read(run.summary)
    assert summary["state"] == "success"
    assert summary["max_lag"] <= 1
    assert summary["digests_equal"] is True
    assert [(each["version"], each["failed"]) for each in summary["evaluations"]] == [("0.0", 0), ("0.3", 0)]
    check_every_trained_trajectory(run, groups=6)


def test_a_local_run_and_its_resume(folder: Path) -> None:
    root = folder / "run"
    small = ("trainer.ranks=1", "inference.replicas=1", "trainer.checkpoint_every=1")
    sets = [part for item in scaled_down(folder, *small) for part in ("--set", item)]
    output = local(CONFIG, "--launcher", "local", "--run-dir", str(root), *sets)
    run = RunDir(root)
    assert "step 2/2" in output
    assert read(run.summary)["state"] == "success"
    assert read(run.trained)["version"] == "0.2"
    check_every_trained_trajectory(run, groups=4)

    local("--resume", str(root), "--launcher", "local", "--set", "trainer.steps=3")
    summary = read(run.summary)
    assert summary["state"] == "success"
    assert read(run.trained)["version"] == "1.3"
    assert summary["duplicates"] == 0
    assert summary["steps"] == 3
    check_every_trained_trajectory(run, groups=6)
    assert _processes_of(run) == []


def test_a_local_run_that_trains_an_adapter_and_its_resume(folder: Path) -> None:
    root = folder / "lora"
    small = (
        "inference.replicas=1",
        "trainer.checkpoint_every=1",
        "lora={rank: 4, alpha: 8}",
        "trainer.optimizer.lr=2e-3",
    )
    sets = [part for item in scaled_down(folder, *small) for part in ("--set", item)]
    local(CONFIG, "--launcher", "local", "--run-dir", str(root), *sets)
    run = RunDir(root)
    assert read(run.summary)["state"] == "success"
    assert read(run.trained)["version"] == "0.2"
    check_every_trained_trajectory(run, groups=4)

    local("--resume", str(root), "--launcher", "local", "--set", "trainer.steps=3")
    summary = read(run.summary)
    assert summary["state"] == "success"
    assert summary["digests_equal"] is True
    assert [each["failed"] for each in summary["evaluations"]] == [0] * len(summary["evaluations"])
    # Trainer and engine agree, also on what was sampled with the adapter that the resumed run loaded.
    gap = summary["logprob_gap_max_lag0"]
    assert gap is None or gap <= 2e-3
    assert read(run.trained)["version"] == "1.3"
    check_every_trained_trajectory(run, groups=6)
    check_what_adapters_left(run)
    assert _processes_of(run) == []
    assert list(Path("/dev/shm").glob(f"hpcrl-{run.run_id}-*")) == []


def check_what_adapters_left(run: RunDir) -> None:
    """Only adapters travelled and were saved; the merged model is the base plus the adapter beside it."""
    from safetensors.torch import load_file

    base, merged = load_file(MODEL / "model.safetensors"), load_file(run.model("1.3") / "model.safetensors")
    adapter = load_file(run.adapter("1.3") / "adapter_model.safetensors")
    nbytes = sum(tensor.nbytes for tensor in adapter.values())
    manifests = [Manifest.from_json(path.read_bytes()) for path in run.manifests.glob("*.json")]
    assert sorted(manifest.version for manifest in manifests) == ["0.0", "0.1", "0.2", "1.2", "1.3"]
    for manifest in manifests:
        assert {entry.name for entry in manifest.tensors} == adapter.keys()
        assert nbytes <= manifest.nbytes < nbytes + 64 * len(adapter)
    whole = sum(tensor.nbytes for tensor in base.values())
    assert nbytes < whole / 4
    checkpoint = sum(path.stat().st_size for path in (run.checkpoints / "1.3").glob("*.distcp"))
    assert nbytes * 3 < checkpoint < whole / 2  # the adapter and Adam's two moments; the frozen weights alone are more
    for name, weight in base.items():
        a, b = (adapter.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{m}.weight") for m in "AB")
        expected = weight if a is None or b is None else weight + 2.0 * (b @ a)
        assert (merged[name] - expected).abs().max() < 1e-6, name
    assert max(tensor.abs().max() for name, tensor in adapter.items() if ".lora_B." in name) > 0
