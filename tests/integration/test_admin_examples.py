"""What slurm/ offers administrators, on a cluster of its own: partitions and preemption, job_submit.lua, prolog and epilog."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hetjobs import ROOT, Jobs

from hpcrl.devcluster import Cluster, ClusterLayout, NodeGroup

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("slurmd", path="/usr/sbin:/sbin:/usr/bin") is None, reason="needs slurmd"),
]

LAYOUT = ClusterLayout(
    name="hpcrl-admin",
    nodes=(
        NodeGroup(prefix="train", partition="train", gpus=2),
        NodeGroup(prefix="infer", partition="infer", gpus=2),
        NodeGroup(prefix="cpu", partition="cpu"),
    ),
)
_NODES = {"gpu[01-08]": "train1", "gpu[09-16]": "infer1", "cpu[001-064]": "cpu1"}


def examples(folder: Path) -> str:
    """The shipped lines with this cluster's nodes and this folder's scripts."""
    text = (ROOT / "slurm/examples/partitions.conf").read_text()
    for theirs, ours in _NODES.items():
        text = text.replace(theirs, ours)
    return text.replace("/etc/slurm/", f"{folder}/")


@pytest.fixture(scope="module")
def site() -> Iterator[Jobs]:
    folder = Path(tempfile.mkdtemp(prefix="hpcrl-admin-", dir="/var/tmp"))
    shutil.copytree(ROOT / "slurm/epilog.d", folder / "epilog.d")
    (folder / "prolog.d").mkdir()
    shutil.copy(ROOT / "slurm/epilog.d/hpcrl-memory", folder / "prolog.d")
    cluster = Cluster(LAYOUT.name)
    cluster.down()
    try:
        cluster.up(LAYOUT)
        conf = cluster.directory / "etc" / "slurm.conf"
        added = examples(folder)
        keys = {line.split("=")[0] for line in added.splitlines() if "=" in line and not line.startswith("#")}
        kept = [line for line in conf.read_text().splitlines() if line.split("=")[0] not in keys - {"KillWait"}]
        conf.write_text("\n".join([*kept, *(line for line in added.splitlines() if "KillWait" not in line), ""]))
        shutil.copy(ROOT / "slurm/examples/job_submit.lua", conf.parent)
        cluster_env = {**os.environ, **cluster.env()}
        subprocess.run(["scontrol", "reconfigure"], env=cluster_env, check=True, timeout=60)
        yield Jobs(cluster, folder)
    finally:
        cluster.down()
        shutil.rmtree(folder)


def until(condition: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def refused(site: Jobs, *argv: str) -> str:
    command = ["sbatch", "--output=/dev/null", *argv]
    done = subprocess.run(command, env=site.env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return done.stderr if done.returncode else ""


def inside(site: Jobs, node: str, script: str) -> str:
    line, env = site.cluster.command(["sh", "-c", script], node=node)
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_settings_are_taken(site: Jobs) -> None:
    found = site.slurm("scontrol", "show", "config")
    for setting in ("preempt/partition_prio", "REQUEUE", "bf_hetjob_prio=min", "epilog.d/*", "prolog.d/*"):
        assert setting in found
    assert "PriorityTier=1 " in site.slurm("scontrol", "show", "partition", "spare")


def test_job_submit_refuses_what_could_never_use_its_nodes(site: Jobs) -> None:
    assert "cpu has no GPUs: take --gpus-per-node out" in refused(
        site, "--partition=cpu", "--gpus-per-node=1", "--wrap=true"
    )
    no_gpus = ["--job-name=hpcrl", "--partition=train", "--wrap=true"]
    assert "train is for GPU jobs: give --gpus-per-node" in refused(site, *no_gpus)
    shipped = ["--nodes=1", ":", "--nodes=1", ":", "--nodes=1", "--gpus-per-node=1", "slurm/launch_hetjob.sh", "x.yaml"]
    assert "cpu has no GPUs" in refused(site, *shipped)
    # The shipped script itself, which then fails for want of its configuration, and other people's jobs pass.
    assert refused(site, "--nodes=1", ":", "--nodes=1", ":", "--nodes=1", "slurm/launch_hetjob.sh", "x.yaml") == ""
    assert refused(site, "--job-name=other", "--partition=train", "--wrap=true") == ""


def test_spare_gives_way_and_comes_back(site: Jobs) -> None:
    starts = site.folder / "starts"
    spare = site.wrap(f"echo x >> {starts}; sleep 300", "--partition=spare", "--exclusive", "--requeue")
    until(starts.exists, "spare starts")
    high = site.wrap("sleep 5", "--partition=cpu", "--exclusive")
    until(lambda: high.state() in ("RUNNING", "COMPLETED"), "the other starts")
    assert spare.state() in ("PENDING", "COMPLETING", "PREEMPTED")
    until(high.over, "the other ends")
    site.slurm("scontrol", "update", f"jobid={spare.job_id}", "StartTime=now")
    until(lambda: starts.read_text().split() == ["x", "x"], "spare again")
    site.cancel_all()


def test_prolog_and_epilog_remove_what_is_left_and_nothing_else(site: Jobs) -> None:
    script = """
    cd /dev/shm
    echo 1 > hpcrl-old-r0.weights; mkdir hpcrl-old-r0.adapters; echo 1 > other; echo 1 > hpcrl-used-r0.weights
    echo 1 > hpcrl-foreign.weights; chown 65534 hpcrl-foreign.weights
    """
    inside(site, "cpu1", script)
    used = "/dev/shm/hpcrl-used-r0.weights"
    mapper = f"import mmap, time; f = open('{used}', 'r+b'); m = mmap.mmap(f.fileno(), 0); f.close(); time.sleep(90)"
    line, env = site.cluster.command([sys.executable, "-c", mapper], node="cpu1")
    with subprocess.Popen(line, env=env) as holder:
        try:
            until(lambda: "hpcrl-used" in inside(site, "cpu1", "cat /proc/[0-9]*/maps 2>/dev/null"), "mapped")
            job = site.wrap("ls /dev/shm; touch /dev/shm/hpcrl-mine-r0.weights", "--partition=cpu")
            until(job.over, "end")
            assert job.text().split() == ["hpcrl-foreign.weights", "hpcrl-used-r0.weights", "other"]  # the prolog
            until(lambda: "hpcrl-mine" not in inside(site, "cpu1", "ls /dev/shm"), "the epilog")
            assert inside(site, "cpu1", "ls /dev/shm").split() == [
                "hpcrl-foreign.weights",
                "hpcrl-used-r0.weights",
                "other",
            ]
        finally:
            inside(site, "cpu1", "rm -rf /dev/shm/*")
            inside(site, "cpu1", "kill $(pgrep -f '[h]pcrl-used-r0') || true")
            holder.wait(30)
    state = site.slurm("sinfo", "-h", "-n", "cpu1", "-o", "%T").split()[0]  # a script that fails drains its node
    assert not state.startswith(("drain", "down", "fail")), state
