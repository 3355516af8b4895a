from __future__ import annotations

from ipaddress import IPv4Network
from pathlib import Path

from hpcrl.devcluster.conf import Endpoint, cgroup_conf, first_job_id, gres_conf, hosts, slurm_conf
from hpcrl.devcluster.layout import ClusterLayout, NodeGroup

STATE = Path("/state")
SUBNET = IPv4Network("10.213.7.0/24")
ENDPOINT = Endpoint(subnet=SUBNET, slurmctld_port=20001, slurmd_port=20002)


def options(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if not line.startswith(("NodeName", "PartitionName"))]
    return dict(line.split("=", 1) for line in lines)


def test_controller_listens_only_at_the_cluster_address() -> None:
    found = options(slurm_conf(ClusterLayout(), ENDPOINT, STATE))
    assert found["SlurmctldHost"] == "ctl(10.213.7.1)"
    assert (found["SlurmctldPort"], found["SlurmdPort"]) == ("20001", "20002")
    assert found["CommunicationParameters"] == "NoCtldInAddrAny"


def test_every_path_lies_in_the_state_directory() -> None:
    found = options(slurm_conf(ClusterLayout(), ENDPOINT, STATE))
    paths = {key: value for key, value in found.items() if "/" in value and "Type" not in key and key != "MailProg"}
    assert set(paths) >= {"AuthInfo", "StateSaveLocation", "SlurmdSpoolDir", "SlurmdLogFile", "SlurmctldPidFile"}
    assert all(value.removeprefix("socket=").startswith("/state/") for value in paths.values())


def test_later_clusters_number_their_jobs_on() -> None:
    endpoint = Endpoint(subnet=SUBNET, slurmctld_port=1, slurmd_port=2, first_job_id=4711)
    assert options(slurm_conf(ClusterLayout(), endpoint, STATE))["FirstJobId"] == "4711"
    now = 1_800_000_123.9
    assert first_job_id(now) < first_job_id(now + 1)
    assert all(0 < first_job_id(now + day * 86400) <= 60_000_000 for day in range(0, 4000, 7))


def test_no_plugin_named_none() -> None:
    assert "none" not in slurm_conf(ClusterLayout(), ENDPOINT, STATE)


def test_node_and_partition_lines() -> None:
    lines = slurm_conf(ClusterLayout(), ENDPOINT, STATE).splitlines()
    train = next(line for line in lines if line.startswith("NodeName=train1 "))
    assert "NodeAddr=10.213.7.10 CPUs=8 " in train and "CoresPerSocket=8 " in train and "Gres=gpu:2 " in train
    assert "Gres" not in next(line for line in lines if line.startswith("NodeName=cpu1 "))
    partitions = [line.split(" MaxTime")[0] for line in lines if line.startswith("PartitionName")]
    assert partitions == [
        "PartitionName=train Nodes=train1 Default=NO",
        "PartitionName=infer Nodes=infer1,infer2 Default=NO",
        "PartitionName=cpu Nodes=cpu1,cpu2 Default=YES",
    ]


def test_groups_of_one_partition_are_joined_and_a_gpu_partition_can_be_default() -> None:
    groups = (
        NodeGroup(prefix="b", partition="x", gpus=1),
        NodeGroup(prefix="c", partition="y", gpus=1),
        NodeGroup(prefix="a", partition="x"),
    )
    lines = slurm_conf(ClusterLayout(nodes=groups), ENDPOINT, STATE).splitlines()
    assert [line.split(" MaxTime")[0] for line in lines[-2:]] == [
        "PartitionName=x Nodes=b1,a1 Default=YES",
        "PartitionName=y Nodes=c1 Default=NO",
    ]


def test_extra_options_replace_whatever_their_case() -> None:
    layout = ClusterLayout(slurm_conf={"slurmdtimeout": 5, "Epilog": "/epilog"})
    found = options(slurm_conf(layout, ENDPOINT, STATE))
    assert "SlurmdTimeout" not in found
    assert (found["slurmdtimeout"], found["Epilog"]) == ("5", "/epilog")


def test_gres_lists_one_device_per_gpu_and_none_without() -> None:
    assert gres_conf(ClusterLayout(), STATE).splitlines() == [
        "NodeName=train1 Name=gpu File=/state/nodes/train1/dev/gpu0",
        "NodeName=train1 Name=gpu File=/state/nodes/train1/dev/gpu1",
        "NodeName=infer1 Name=gpu File=/state/nodes/infer1/dev/gpu0",
        "NodeName=infer2 Name=gpu File=/state/nodes/infer2/dev/gpu0",
    ]
    plain = ClusterLayout(nodes=(NodeGroup(prefix="n", partition="p"),))
    assert gres_conf(plain, STATE) == ""
    assert "GresTypes" not in slurm_conf(plain, ENDPOINT, STATE)


def test_cgroup_conf_follows_the_version() -> None:
    assert cgroup_conf((22, 5)) == "CgroupPlugin=cgroup/v1\n"
    assert cgroup_conf((23, 2)) == cgroup_conf((24, 11)) == "CgroupPlugin=disabled\n"


def test_hosts_name_every_node_and_the_machine() -> None:
    lines = hosts(ClusterLayout(), SUBNET, "box").splitlines()
    assert "10.213.7.1 ctl box" in lines
    assert "10.213.7.14 cpu2" in lines
    assert "10.213.7.1 ctl" in hosts(ClusterLayout(), SUBNET, "localhost").splitlines()
