"""Workers that join a run on a real Slurm: they take attempts, may go at any time, and leave when it ends."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from hetjobs import FULL_STACK, ROOT, Jobs
from test_hetjob import (
    CONFIG,
    HPCRL,
    SMALLEST,
    START_S,
    _processes_of,
    check_every_trained_trajectory,
    read,
    scaled_down,
)

from hpcrl.protocol.rundir import RunDir

pytestmark = [*FULL_STACK, pytest.mark.timeout(2400)]


def add(jobs: Jobs, run: RunDir, *options: str) -> subprocess.CompletedProcess[str]:
    sbatch = f"--sbatch=--output={jobs.folder}/workers-%j.out"
    argv = [str(HPCRL), "workers", "add", str(run.root), sbatch, *options]
    return subprocess.run(argv, env=jobs.env, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def job_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.split(";")[0].removeprefix("submitted job ")


def attempts_of(run: RunDir, job_id: str) -> list[str]:
    """States of the attempts that workers of that job had. For a run that has ended: its coordinator keeps the database to itself."""
    with closing(sqlite3.connect(f"file:{run.database}?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT state FROM attempts WHERE worker_id LIKE ?", (f"%-j{job_id}",))
        return [row[0] for row in rows]


def test_workers_join_take_attempts_go_and_leave_with_the_run(jobs: Jobs) -> None:
    sets = scaled_down(
        jobs.folder, "trainer.steps=18", "tasks.eval=null", "coordinator.infra_retries=0", "model.stage=/tmp"
    )
    job = jobs.submit(CONFIG, *sets, sbatch=SMALLEST)
    run = RunDir(job.run_dir)
    job.wait_for(lambda: any(run.shards.glob("*.h5")), START_S, "shard")

    gone = job_of(add(jobs, run, "--partition", "cpu"))
    job.wait_for(lambda: any(run.shards.glob(f"*-j{gone}-*.h5")), 300, "shard of the worker that joined")
    jobs.slurm("scancel", gone)
    stays = job_of(add(jobs, run, "--partition", "cpu", "--nodes", "1", "--array"))
    job.wait_for(lambda: any(run.logs("worker").glob("joined-*")), 300, "second worker")

    assert job.wait(START_S) == "COMPLETED", job.evidence()
    summary = read(run.summary)
    assert (summary["state"], summary["steps"], summary["duplicates"]) == ("success", 18, 0)
    check_every_trained_trajectory(run, groups=36)
    taken = attempts_of(run, gone)
    assert "consumed" in taken
    assert "infra_failed" not in taken
    # Whoever goes costs no rollout: what it held was tried again, and no retry was spent.
    assert read(run.final_status)["failures"] == {}
    job.wait_for(lambda: jobs.slurm("squeue", "-h") == "", 120, "end of the workers", fails_with_job=False)
    last = jobs.slurm("squeue", "-h", "--states=all", "-j", stays, "-o", "%T")
    assert set(last.split()) == {"COMPLETED"}, last
    assert _processes_of(run) == []
    sandboxes = jobs.on_nodes("sh", "-c", "ls -d /tmp/hpcrl-*/w-* 2>/dev/null || true")
    assert set(sandboxes.values()) == {""}, sandboxes
    for path in (run.keys, *run.keys.iterdir(), run.token):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path

    # Each node of trainer and inference copied the model once; its /tmp is its own.
    staged = jobs.on_nodes("sh", "-c", "ls -d /tmp/hpcrl-*/*/model.safetensors 2>/dev/null || true")
    assert sorted((node[:5], len(found.split())) for node, found in staged.items() if found) == [
        ("infer", 1),
        ("train", 1),
    ]

    late = add(jobs, run)
    assert late.returncode == 2
    assert "has ended (success)" in late.stderr


def test_a_run_that_nodes_do_not_see_or_that_is_unknown(jobs: Jobs, tmp_path: Path) -> None:
    done = add(jobs, RunDir(tmp_path))
    assert (done.returncode, "holds no run" in done.stderr) == (2, True)
    script = ROOT / "slurm" / "workers.sh"
    output = jobs.folder / "out"
    argv = ["sbatch", "--wait", f"--output={output}", str(script), "--run-dir", "/tmp/nowhere"]
    subprocess.run(argv, env={**os.environ, **jobs.env}, cwd=ROOT, capture_output=True, timeout=300, check=False)
    assert "hpcrl: /tmp/nowhere holds no run that can be seen here" in output.read_text()
