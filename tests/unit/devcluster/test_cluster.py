from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcrl.devcluster.cluster import Cluster, ClusterStatus, NodeStatus
from hpcrl.devcluster.netns import Network
from hpcrl.errors import EnvironmentFault, UserError


def test_absent_cluster_says_so(tmp_path: Path) -> None:
    cluster = Cluster("none", base=tmp_path)
    assert cluster.status() == ClusterStatus(name="none", directory=tmp_path / "none", exists=False)
    assert not cluster.status().healthy
    with pytest.raises(UserError, match="does not exist; start it with"):
        cluster.command(["true"])


def test_base_directory_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCRL_DEVCLUSTER_DIR", "/srv/clusters")
    assert Cluster("x").env() == {"SLURM_CONF": "/srv/clusters/x/etc/slurm.conf"}


def test_bad_name_is_refused() -> None:
    with pytest.raises(UserError, match="lower-case"):
        Cluster("../x")


def test_up_needs_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EnvironmentFault, match="needs root"):
        Cluster("x", base=tmp_path).up()


def test_damaged_state_file_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "state.json").write_text("{}")
    with pytest.raises(UserError, match="down --name x"):
        Cluster("x", base=tmp_path).status()


def test_health_needs_every_daemon_and_every_node() -> None:
    node = NodeStatus(name="n1", address="10.0.0.1", partition="p", cpus=1, gpus=0, state="idle", slurmd=True)
    good = {"name": "x", "directory": Path("/x"), "exists": True, "munged": True, "slurmctld": True}
    assert ClusterStatus(**good, nodes=(node,)).healthy
    assert not ClusterStatus(**{**good, "munged": False}, nodes=(node,)).healthy


def test_network_names_fit_and_differ_between_state_directories() -> None:
    one, two = Network(Path("/a/x"), "x"), Network(Path("/b/x"), "x")
    assert one.host_interface != two.host_interface
    assert len(one.host_interface) <= 15
    assert not two.node_namespace("n1").startswith(one.prefix)
