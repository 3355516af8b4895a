"""Texts of the cluster's configuration files. Pure functions.

Written for Slurm 22.05 up to 24.11. Plugins whose default is "none" are left out: newer versions removed those names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Network
from itertools import groupby
from pathlib import Path

from hpcrl.devcluster.layout import CONTROLLER, ClusterLayout, Node, controller_address, node_address

# Job starts within a second or two: short backfill cycle (het jobs start through backfill only), no batch delay.
_SCHEDULER = (
    "bf_interval=1,bf_hetjob_immediate,bf_hetjob_prio=min,bf_continue,batch_sched_delay=0,"
    "sched_interval=5,sched_min_interval=100000,requeue_delay=1"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where the cluster's daemons listen, and the number its jobs begin with."""

    subnet: IPv4Network
    slurmctld_port: int
    slurmd_port: int
    first_job_id: int = 1


def slurm_conf(layout: ClusterLayout, endpoint: Endpoint, state_dir: Path) -> str:
    """slurm.conf: one option per line, then one line per node and per partition."""
    nodes = layout.unrolled()
    address = controller_address(endpoint.subnet)
    options: dict[str, str | int] = {
        "ClusterName": layout.name,
        "SlurmctldHost": f"{CONTROLLER}({address})",
        "SlurmctldPort": endpoint.slurmctld_port,
        "SlurmdPort": endpoint.slurmd_port,
        # Two controllers on one machine: each binds only its own address.
        "CommunicationParameters": "NoCtldInAddrAny",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={state_dir}/munge/socket",
        "CredType": "cred/munge",
        "StateSaveLocation": f"{state_dir}/slurmctld/state",
        "SlurmctldPidFile": f"{state_dir}/slurmctld/slurmctld.pid",
        "SlurmctldLogFile": f"{state_dir}/slurmctld/slurmctld.log",
        "SlurmdSpoolDir": f"{state_dir}/nodes/%n/spool",
        "SlurmdPidFile": f"{state_dir}/nodes/%n/slurmd.pid",
        "SlurmdLogFile": f"{state_dir}/nodes/%n/slurmd.log",
        "MailProg": "/bin/true",
        # Else every cluster's first job writes slurm-1.out over that of the one before.
        "FirstJobId": endpoint.first_job_id,
        "ProctrackType": "proctrack/linuxproc",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": _SCHEDULER,
        # A node may claim more CPUs and memory than the machine has.
        "SlurmdParameters": "config_overrides",
        "ReturnToService": 2,
        "JobRequeue": 1,
        "InactiveLimit": 0,
        "KillWait": 5,
        # The whole cluster shares a few cores: be patient before calling anything dead. Slurm wants the second to be
        # at least five times the first.
        "MessageTimeout": 20,
        "UnkillableStepTimeout": 100,
        "TCPTimeout": 10,
        "SlurmctldTimeout": 60,
        "SlurmdTimeout": 60,
    }
    if any(node.gpus for node in nodes):
        options["GresTypes"] = "gpu"
    lines = [f"{key}={value}" for key, value in _merged(options, layout.slurm_conf).items()]
    lines += [_node_line(node, node_address(endpoint.subnet, node)) for node in nodes]
    lines += _partition_lines(nodes)
    return "\n".join(lines) + "\n"


def first_job_id(now: float) -> int:
    """The number of a new cluster's first job: seconds since the epoch, within Slurm's range (67,043,327) and with room for more.

    A cluster does not run a job per second, so that later clusters begin above its last one until two years have gone by.
    """
    return 1 + int(now) % 60_000_000


def gres_conf(layout: ClusterLayout, state_dir: Path) -> str:
    """gres.conf: the fake GPUs of each node."""
    lines = []
    for node in layout.unrolled():
        for device in gpu_devices(node, state_dir):
            lines.append(f"NodeName={node.name} Name=gpu File={device}")
    return "".join(line + "\n" for line in lines)


def gpu_devices(node: Node, state_dir: Path) -> list[Path]:
    """Device files of the node's fake GPUs; the trailing number becomes the index in CUDA_VISIBLE_DEVICES."""
    return [state_dir / "nodes" / node.name / "dev" / f"gpu{number}" for number in range(node.gpus)]


def cgroup_conf(slurm_version: tuple[int, int]) -> str:
    """cgroup.conf that keeps Slurm's hands off cgroups: there is no systemd to ask and nothing is enforced.

    Before 23.02 there is no ``disabled``; the v1 plugin touches nothing until another plugin uses it.
    """
    return "CgroupPlugin=disabled\n" if slurm_version >= (23, 2) else "CgroupPlugin=cgroup/v1\n"


def hosts(layout: ClusterLayout, subnet: IPv4Network, machine: str) -> str:
    """/etc/hosts inside the nodes. ``machine`` is the host name of the machine, reachable at the controller's address."""
    names = dict.fromkeys([CONTROLLER, *([machine] if machine != "localhost" else [])])
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost", f"{controller_address(subnet)} {' '.join(names)}"]
    lines += [f"{node_address(subnet, node)} {node.name}" for node in layout.unrolled()]
    return "\n".join(lines) + "\n"


def _merged(options: dict[str, str | int], extra: dict[str, str | int]) -> dict[str, str | int]:
    """``options`` with those of ``extra`` in place; slurm.conf names do not depend on case."""
    replaced = {key.lower() for key in extra}
    return {key: value for key, value in options.items() if key.lower() not in replaced} | extra


def _node_line(node: Node, address: str) -> str:
    gres = f" Gres=gpu:{node.gpus}" if node.gpus else ""
    return (
        f"NodeName={node.name} NodeAddr={address} CPUs={node.cpus} Boards=1 SocketsPerBoard=1"
        f" CoresPerSocket={node.cpus} ThreadsPerCore=1 RealMemory={node.memory_mb}{gres} State=UNKNOWN"
    )


def _partition_lines(nodes: Iterable[Node]) -> list[str]:
    """One line per partition. The default one is the first without GPUs, else the first."""
    ordered = sorted(nodes, key=lambda node: node.index)
    first_seen = {name: position for position, name in enumerate(dict.fromkeys(node.partition for node in ordered))}
    ordered.sort(key=lambda node: (first_seen[node.partition], node.index))
    members = {name: list(group) for name, group in groupby(ordered, key=lambda node: node.partition)}
    plain = [name for name, group in members.items() if not any(node.gpus for node in group)]
    default = (plain or list(members))[0]
    return [
        f"PartitionName={name} Nodes={','.join(node.name for node in group)}"
        f" Default={'YES' if name == default else 'NO'} MaxTime=INFINITE State=UP"
        for name, group in members.items()
    ]
