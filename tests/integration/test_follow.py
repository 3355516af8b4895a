"""``hpcrl run --launcher slurm`` and ``hpcrl status --follow`` on a real Slurm: through requeues to the end and the summary."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hetjobs import ROOT, Jobs
from test_hetjob import CONFIG, HPCRL, START_S, read, scaled_down

from hpcrl.bench.life_jobs import LifeCluster
from hpcrl.launch.environment import clean_environment
from hpcrl.protocol.rundir import RunDir

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.apptainer,
    pytest.mark.mpi,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
]


def until(condition: Callable[[], bool], process: subprocess.Popen[str], output: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.5)


@pytest.fixture
def cluster() -> Iterator[LifeCluster]:
    folder = Path(tempfile.mkdtemp(prefix="hpcrl-follow-", dir="/var/tmp"))
    folder.chmod(0o711)  # run by root, sandboxes are another user's
    found = LifeCluster("hpcrl-follow", folder)
    try:
        found.up()
        yield found
    finally:
        found.cluster.down()
        shutil.rmtree(folder)


def test_status_follows_a_job_through_a_requeue_and_a_preemption(cluster: LifeCluster) -> None:
    job, said = cluster.submit(60, stand_in=True), cluster.folder / "said"
    job.until(lambda: job.steps() >= 2, "second step")
    argv = [str(HPCRL), "status", str(job.run.root), "--follow"]
    env = {**clean_environment(os.environ), **cluster.cluster.env()}
    with (
        open(said, "w") as out,
        subprocess.Popen(argv, env=env, cwd=ROOT, stdout=out, stderr=out, text=True) as process,
    ):
        try:
            until(lambda: "step " in said.read_text(), process, said, 60)
            cluster.slurm("scancel", "--batch", "--signal=USR1", job.job_id)
            until(lambda: "timeout: the time limit is near" in said.read_text(), process, said, 300)
            job.soon_again()
            job.more_steps()
            options = ["--partition=urgent", f"--nodelist={job.nodes()[1]}", "--exclusive", "--output=/dev/null"]
            cluster.slurm("sbatch", *options, "--wrap=sleep 3")
            until(lambda: "cancelled: stopped by SIGTERM" in said.read_text(), process, said, 300)
            job.soon_again()
            assert process.wait(START_S) == 0, said.read_text()
        finally:
            process.terminate()
    assert said.read_text().count("waiting for Slurm to end the job, or to start it again") == 2
    assert read(job.run.summary)["state"] == "success"
    assert job.run.job.read_text().strip() == job.job_id


@pytest.mark.vllm
@pytest.mark.long
def test_a_requeued_job_is_followed_to_its_real_end(jobs: Jobs) -> None:
    run, said = RunDir(jobs.folder / "run"), jobs.folder / "said"
    sets = [part for item in scaled_down(jobs.folder, "trainer.steps=3", "tasks.eval=null") for part in ("--set", item)]
    argv = [str(HPCRL), "run", CONFIG, "--launcher", "slurm", "--run-dir", str(run.root), *sets]
    env = {**jobs.env, "SBATCH_OUTPUT": f"{jobs.folder}/slurm-%j.out"}
    with (
        open(said, "w") as out,
        subprocess.Popen(argv, env=env, cwd=ROOT, stdout=out, stderr=out, text=True) as process,
    ):
        try:
            until(lambda: len(list(run.manifests.glob("*"))) > 1, process, said, START_S)
            job = re.search(r"submitted job (\d+)", said.read_text())
            assert job is not None
            jobs.slurm("scancel", "--batch", "--signal=USR1", job[1])
            until(lambda: "waiting for Slurm to end the job" in said.read_text(), process, said, 300)

            def waits() -> bool:
                return "PENDING" in jobs.slurm("squeue", "-h", "--states=all", "-j", job[1], "-o", "%T")

            until(waits, process, said, 300)
            jobs.slurm("scontrol", "update", f"jobid={job[1]}", "StartTime=now")
            assert process.wait(START_S) == 0, said.read_text()
        finally:
            process.terminate()
            if (job := re.search(r"submitted job (\d+)", said.read_text())) is not None:
                subprocess.run(["scancel", job[1]], env=jobs.env, check=False, timeout=60)
    assert read(run.summary)["state"] == "success"
    assert read(run.summary)["steps"] == 3
    assert f"summary: {run.summary}" in said.read_text()
