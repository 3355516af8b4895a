"""A small cluster of its own beside whatever runs: start, repair, use, remove without a trace."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.devcluster import Cluster, ClusterLayout, NodeGroup
from hpcrl.devcluster.procs import identify, snapshot, wait_for

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("slurmd", path="/usr/sbin:/sbin:/usr/bin") is None, reason="needs slurmd"),
]

LAYOUT = ClusterLayout(
    name="hpcrl-test",
    nodes=(NodeGroup(prefix="gpu", partition="train", gpus=2), NodeGroup(prefix="cpu", count=2, partition="cpu")),
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    found = Cluster(LAYOUT.name)
    found.down()
    found.up(LAYOUT)
    yield found
    found.down()


def run(cluster: Cluster, *argv: str, node: str | None = None) -> str:
    line, env = cluster.command(argv, node=node)
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_is_up(cluster: Cluster) -> None:
    now = cluster.status()
    assert now.healthy
    assert [node.state for node in now.nodes] == ["idle"] * 3


def test_second_up_changes_nothing(cluster: Cluster) -> None:
    lines: list[str] = []
    before = {node: cluster.node(node).slurmd() for node in ("gpu1", "cpu1", "cpu2")}
    cluster.up(progress=lines.append)
    assert lines == ["node gpu1: idle", "node cpu1: idle", "node cpu2: idle"]
    assert {node: cluster.node(node).slurmd() for node in before} == before


def test_srun_reaches_every_partition(cluster: Cluster) -> None:
    assert sorted(run(cluster, "srun", "-p", "cpu", "-N2", "hostname").split()) == ["cpu1", "cpu2"]
    command = ["srun", "-p", "train", "--gres=gpu:2", "sh", "-c", "hostname; echo $CUDA_VISIBLE_DEVICES"]
    assert run(cluster, *command).split() == ["gpu1", "0,1"]


def test_tasks_of_a_node_see_what_replicas_choose_their_gpus_from(cluster: Cluster) -> None:
    """Unbound tasks see all GPUs of the step; bound ones see fewer than Slurm says that it gave."""
    show = ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES/$SLURM_GPUS_ON_NODE"]
    assert run(cluster, "srun", "-p", "train", "-n2", "--gpus-per-node=2", *show).split() == ["0,1/2", "0,1/2"]
    assert sorted(run(cluster, "srun", "-p", "train", "-n2", "--gpus-per-task=1", *show).split()) == ["0/2", "1/2"]


def test_the_sites_settings_do_not_reach_the_cluster_and_the_users_do(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = ("sbatch", "--parsable", "-o", "/dev/null", "--wrap", "true")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setenv("SBATCH_PARTITION", "of-the-site")
    monkeypatch.setenv("SLURM_CLUSTERS", "of-the-site")
    first = int(run(cluster, *submit))
    assert first > 1000  # ids do not start again with every cluster
    hpcrl = f"{Path(sys.executable).with_name('hpcrl')} devcluster"
    line = f'eval "$({hpcrl} env --name {cluster.name})"; export SBATCH_JOB_NAME=mine; '
    line += f"{hpcrl} exec --name {cluster.name} -- {' '.join(submit)}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert run(cluster, "squeue", "-h", "-t", "all", "-j", done.stdout.strip(), "-o", "%j") == "mine\n"


def test_nodes_reach_each_other_by_name(cluster: Cluster) -> None:
    script = (
        "import socket\n"
        "server = socket.create_server(('cpu1', 0))\n"
        "print(server.getsockname()[1], flush=True)\n"
        "server.settimeout(20)\n"
        "server.accept()[0].sendall(b'hello')\n"
    )
    line, env = cluster.command(["python3", "-c", script], node="cpu1")
    with subprocess.Popen(line, env=env, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        client = f"import socket; print(socket.create_connection(('cpu1', {port}), 10).recv(5).decode())"
        assert run(cluster, "python3", "-c", client, node="gpu1") == "hello\n"


@pytest.mark.parametrize("directory", ["/tmp", "/dev/shm"])
def test_tmp_and_shm_belong_to_one_node(cluster: Cluster, directory: str) -> None:
    run(cluster, "touch", f"{directory}/mine", node="cpu1")
    assert "mine" in run(cluster, "ls", directory, node="cpu1")
    assert "mine" not in run(cluster, "ls", directory, node="cpu2")
    assert not Path(directory, "mine").exists()


MPI_PROGRAM = """
import sys
from mpi4py import MPI
world = MPI.COMM_WORLD
total = world.allreduce(world.Get_rank())
groups = world.gather(sys.argv[1])
if world.Get_rank() == 0:
    print(world.Get_size(), total, "".join(groups), flush=True)
"""

HET_SCRIPT = """#!/bin/bash
#SBATCH -p train -N1 --ntasks-per-node=2 -c1 --gres=gpu:2
#SBATCH hetjob
#SBATCH -p cpu -N1 --ntasks-per-node=2 -c1
#SBATCH hetjob
#SBATCH -p cpu -N1 --ntasks-per-node=1 -c1
export MPIR_CVAR_NOLOCAL=1
srun --het-group=2 sleep 600 &
timeout 60 srun --kill-on-bad-exit --het-group=0 --mpi=pmi2 {python} -m mpi4py {program} t \\
    : --het-group=1 --mpi=pmi2 {python} -m mpi4py {program} i
echo status $?
"""


@pytest.mark.mpi
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py")
def test_one_mpi_world_spans_two_het_components_beside_a_third(cluster: Cluster) -> None:
    """The node names sort against the group order, which misleads MPICH unless MPIR_CVAR_NOLOCAL is set."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        program, script, out = (Path(directory, name) for name in ("mpi.py", "job.sh", "out"))
        program.write_text(MPI_PROGRAM)
        script.write_text(HET_SCRIPT.format(python=sys.executable, program=program))
        run(cluster, "sbatch", "--wait", "-o", str(out), str(script))
        lines = [line for line in out.read_text().splitlines() if "error" not in line]
    assert lines[:2] == ["4 6 ttii", "status 0"]


def test_a_killed_slurmd_is_repaired(cluster: Cluster) -> None:
    slurmd = cluster.node("cpu2").slurmd()
    assert slurmd is not None
    os.kill(slurmd.pid, signal.SIGKILL)
    assert wait_for(lambda: cluster.node("cpu2").slurmd() is None, timeout_s=5)
    assert not cluster.status().healthy
    cluster.up()
    assert cluster.status().healthy
    assert run(cluster, "srun", "-w", "cpu2", "hostname") == "cpu2\n"


def test_a_drained_node_and_a_dead_controller_are_repaired(cluster: Cluster) -> None:
    run(cluster, "scontrol", "update", "nodename=cpu1", "state=drain", "reason=test")
    assert not cluster.status().healthy
    controller = next(proc for proc in snapshot() if proc.comm == "slurmctld" and _conf(proc.pid) == cluster.env())
    os.kill(controller.pid, signal.SIGKILL)
    assert wait_for(lambda: not cluster.status().slurmctld, timeout_s=10)
    cluster.up()
    assert cluster.status().healthy


def test_a_power_cut_ends_detached_processes_and_up_boots_again(cluster: Cluster) -> None:
    run(cluster, "sh", "-c", "setsid unshare --net --pid --fork sleep 4321 >/dev/null 2>&1 &", node="cpu1")
    assert wait_for(lambda: _sleepers("4321") == 1, timeout_s=5)
    cluster.node("cpu1").halt()
    assert wait_for(lambda: _sleepers("4321") == 0, timeout_s=5)
    cluster.up()
    assert run(cluster, "srun", "-w", "cpu1", "hostname") == "cpu1\n"


def test_two_clusters_stand_side_by_side_and_the_machines_own_slurm_is_untouched(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setenv("HPCRL_DEVCLUSTER_DIR", f"{cluster.directory.parent}-second")
    system = Path("/etc/slurm"), Path("/etc/munge"), Path("/var/lib/slurm"), Path("/run/munge")
    before = [_listing(folder) for folder in system]
    # The same name and the same host names, elsewhere: nothing of it may be shared.
    second = Cluster(LAYOUT.name)
    assert second.directory != cluster.directory
    try:
        second.up(LAYOUT)
        run(second, "sbatch", "-J", "second", "-p", "cpu", "-o", "/dev/null", "--wrap", "sleep 4324")
        assert run(second, "squeue", "-h", "-o", "%j") == "second\n"
        assert "second" not in run(cluster, "squeue", "-h", "-o", "%j").split()
        assert run(cluster, "srun", "-w", "cpu2", "hostname") == "cpu2\n"
    finally:
        second.down()
        second.directory.parent.rmdir()
    assert cluster.status().healthy
    assert [_listing(folder) for folder in system] == before


def test_down_leaves_nothing_even_under_load(cluster: Cluster) -> None:
    run(cluster, "sbatch", "-N2", "-p", "cpu", "-o", "/dev/null", "--wrap", "srun setsid sleep 4322")
    assert wait_for(lambda: _sleepers("4322") == 2, timeout_s=20)
    # A shell that somebody left in a node's network only: outside its processes, still a user of the namespace.
    stray = subprocess.Popen(["nsenter", f"--net={_namespaces(cluster)[0]}", "sleep", "4323"])
    assert cluster.down()
    stray.wait(timeout=5)
    assert _sleepers("4322") == _sleepers("4323") == 0
    assert not [proc for proc in snapshot() if _conf(proc.pid) == cluster.env()]
    assert _namespaces(cluster) == []
    assert not cluster.directory.exists()
    assert str(cluster.directory) not in Path("/proc/self/mountinfo").read_text()
    links = os.listdir("/sys/class/net")
    assert not [link for link in links if link == cluster._network.host_interface]
    assert not cluster.down()
    assert not cluster.status().exists


def test_up_removes_what_a_killed_up_left(cluster: Cluster) -> None:
    cluster.up(LAYOUT)
    init = cluster.node("cpu1").init()
    (cluster.directory / "state.json").unlink()
    cluster.up(LAYOUT)
    assert init is not None and not init.alive()
    assert identify(init.pid) != init
    assert cluster.status().healthy


def _conf(pid: int) -> dict[str, str]:
    """SLURM_CONF in the environment of a process."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    values = [entry[11:].decode() for entry in entries if entry.startswith(b"SLURM_CONF=")]
    return {"SLURM_CONF": values[0]} if values else {}


def _listing(folder: Path) -> list[tuple[str, float]]:
    """Names and times of change of everything in a folder."""
    return sorted((str(path), path.lstat().st_mtime) for path in folder.rglob("*"))


def _sleepers(seconds: str) -> int:
    """Processes ``sleep SECONDS`` on the whole machine."""
    count = 0
    for proc in snapshot():
        if proc.comm == "sleep":
            try:
                count += seconds in Path(f"/proc/{proc.pid}/cmdline").read_text()
            except OSError:
                continue
    return count


def _namespaces(cluster: Cluster) -> list[str]:
    return [f"/run/netns/{name}" for name in cluster._network.namespaces()]
