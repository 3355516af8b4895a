"""A development cluster: up, status, down, and running commands in it.

State directory (``$HPCRL_DEVCLUSTER_DIR/<name>``, by default /var/tmp/hpcrl/devcluster/<name>; never below /tmp, which
is private to each node):

    state.json            layout, subnet, ports: enough to repair or remove the cluster after a crash of ``up``
    etc/                  slurm.conf gres.conf cgroup.conf hosts
    munge/ slurmctld/     key, socket, pid files, logs, saved state
    nodes/<node>/         tmp/ (the node's /tmp) dev/ (fake GPUs) spool/ init.pid slurmd.log

``up`` and ``down`` of all clusters below one base directory exclude each other by a lock on that directory.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from hpcrl.devcluster import conf, control, daemons
from hpcrl.devcluster.layout import ClusterLayout, controller_address, load_layout, node_address
from hpcrl.devcluster.netns import Network, free_subnet
from hpcrl.devcluster.node import NodeHost, last_line
from hpcrl.devcluster.procs import end, identify, snapshot
from hpcrl.devcluster.variables import foreign
from hpcrl.errors import EnvironmentFault, UserError

_DEFAULT_BASE = Path("/var/tmp/hpcrl/devcluster")
_COMMANDS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "hostname": "hostname",
}
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
_SOCKET_PATH_LIMIT = 100  # bytes; the kernel's is 108

Progress = Callable[[str], None]


class _State(BaseModel):
    """What state.json holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layout: ClusterLayout
    subnet: IPv4Network
    slurmctld_port: int
    slurmd_port: int
    slurm_version: tuple[int, int]
    first_job_id: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStatus:
    """One node. ``state`` is Slurm's, or ``unknown`` without a controller."""

    name: str
    address: str
    partition: str
    cpus: int
    gpus: int
    state: str
    slurmd: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterStatus:
    """A cluster as it is now. ``exists`` is False when there is no state directory."""

    name: str
    directory: Path
    exists: bool
    munged: bool = False
    slurmctld: bool = False
    jobs: int = 0
    nodes: tuple[NodeStatus, ...] = ()

    @property
    def healthy(self) -> bool:
        """Everything runs and every node takes jobs."""
        nodes_up = all(node.slurmd and control.usable(node.state) for node in self.nodes)
        return self.exists and self.munged and self.slurmctld and nodes_up


class Cluster:
    """A cluster by name. Example: ``Cluster("hpcrl").up()``; nothing happens before a method is called."""

    def __init__(self, name: str = "hpcrl", *, base: Path | None = None) -> None:
        self.name = load_layout(None, name=name).name
        self._base = base or Path(os.environ.get("HPCRL_DEVCLUSTER_DIR") or _DEFAULT_BASE)
        self.directory = self._base.absolute() / name
        self._network = Network(self.directory, name)

    def up(self, layout: ClusterLayout | None = None, *, progress: Progress = lambda line: None) -> None:
        """Start the cluster, or repair it: dead daemons are restarted, drained nodes resumed. Returns when all nodes
        take jobs.

        Raises UserError when it exists with another layout, EnvironmentFault when the machine cannot do it.
        """
        self._preflight()
        if layout is not None and layout.name != self.name:
            raise UserError(f"the layout is named {layout.name!r}, the cluster {self.name!r}; use one name")
        with self._lock():
            state = self._load()
            if state is not None and layout is not None and layout != state.layout:
                raise UserError(
                    f"cluster {self.name} exists with another layout; run 'hpcrl devcluster down --name {self.name}' first"
                )
            if state is None:
                state = self._create(layout or ClusterLayout(name=self.name), progress)
            self._start(state, progress)

    def down(self, *, progress: Progress = lambda line: None) -> bool:
        """Cancel all jobs and remove every process, namespace, link and file of the cluster; False if there was none."""
        self._preflight()
        if not self.directory.exists() and not self._network.namespaces():
            return False
        with self._lock():
            if daemons.slurmctld(self.directory).running() is not None:
                with suppress(EnvironmentFault):  # a broken controller must not stop the clean-up
                    control.cancel_all(self._daemon_env(), patience_s=5)
            self._clean(progress)
        return True

    def status(self) -> ClusterStatus:
        """How the cluster is now. Raises UserError if its state file cannot be read."""
        state = self._load()
        if state is None:
            return ClusterStatus(name=self.name, directory=self.directory, exists=False)
        env, processes = self._daemon_env(), snapshot()
        controller = daemons.slurmctld(self.directory).running() is not None and daemons.answers(env)
        states = control.node_states(env) if controller else {}
        nodes = []
        for node in state.layout.unrolled():
            nodes.append(
                NodeStatus(
                    name=node.name,
                    address=node_address(state.subnet, node),
                    partition=node.partition,
                    cpus=node.cpus,
                    gpus=node.gpus,
                    state=states.get(node.name, "unknown"),
                    slurmd=self.node(node.name).slurmd(processes) is not None,
                )
            )
        return ClusterStatus(
            name=self.name,
            directory=self.directory,
            exists=True,
            munged=daemons.munged(self.directory).running() is not None,
            slurmctld=controller,
            jobs=len(control.jobs(env)) if controller else 0,
            nodes=tuple(nodes),
        )

    def env(self) -> dict[str, str]:
        """Variables that make sbatch, srun and the others reach this cluster."""
        return {"SLURM_CONF": str(self.directory / "etc" / "slurm.conf")}

    def foreign(self) -> set[str]:
        """Variables of this process that are meant for another Slurm, and would misdirect commands for this one."""
        return foreign(os.environ, self.env()["SLURM_CONF"])

    def command(self, argv: Sequence[str], *, node: str | None = None) -> tuple[list[str], dict[str, str]]:
        """Command line and environment that run ``argv`` against the cluster, on the machine or inside ``node``.

        Slurm variables that are meant for another cluster are left out (:func:`hpcrl.devcluster.variables.foreign`).
        """
        state = self._load()
        if state is None:
            raise UserError(f"cluster {self.name} does not exist; start it with 'hpcrl devcluster up'")
        left_out = self.foreign()
        env = {key: value for key, value in os.environ.items() if key not in left_out} | self.env()
        if node is None:
            return list(argv), env
        names = [each.name for each in state.layout.unrolled()]
        if node not in names:
            raise UserError(f"cluster {self.name} has no node {node!r}; there are {', '.join(names)}")
        return self.node(node).enter(list(argv)), env

    def run(self, argv: Sequence[str], *, node: str | None = None) -> int:
        """Run ``argv`` in the foreground, as in :meth:`command`; its exit code."""
        line, env = self.command(argv, node=node)
        try:
            return subprocess.run(line, env=env, check=False).returncode
        except FileNotFoundError as error:
            raise UserError(f"{line[0]}: command not found") from error

    def limit_links(self, rate: str | None) -> None:
        """Limit every node's link to ``rate`` ("1gbit"), both directions; None: as fast as the machine copies."""
        state = self._load()
        if state is None:
            raise UserError(f"cluster {self.name} does not exist; start it with 'hpcrl devcluster up'")
        for node in state.layout.unrolled():
            self._network.limit(node, rate)

    def node(self, name: str) -> NodeHost:
        """The machine behind a node: ``.slurmd()`` to find its daemon, ``.halt()`` to cut its power."""
        hosts = self.directory / "etc" / "hosts"
        return NodeHost(name, self.directory / "nodes" / name, self._network.node_path(name), hosts)

    def _preflight(self) -> None:
        if os.geteuid() != 0:
            raise EnvironmentFault("the development cluster needs root (network namespaces, device files); use sudo")
        path = f"{os.environ.get('PATH', '')}:{_SBIN}"
        missing = {package for command, package in _COMMANDS.items() if shutil.which(command, path=path) is None}
        if missing:
            raise EnvironmentFault(f"missing programs; install them: apt-get install {' '.join(sorted(missing))}")
        if len(str(self.directory / "munge" / "socket")) > _SOCKET_PATH_LIMIT:
            raise UserError(f"state directory {self.directory} is too long for a socket; set HPCRL_DEVCLUSTER_DIR")
        if self.directory.is_relative_to("/tmp"):
            raise UserError(f"state directory {self.directory} is below /tmp, which each node has for itself")

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self._base.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._base, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _load(self) -> _State | None:
        path = self.directory / "state.json"
        try:
            return _State.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise UserError(f"{path} is not readable; run 'hpcrl devcluster down --name {self.name}'") from error

    def _create(self, layout: ClusterLayout, progress: Progress) -> _State:
        """Choose addresses and write the state file, after removing what a killed ``up`` or ``down`` left behind."""
        self._clean(progress)
        seed = int(hashlib.sha256(str(self.directory).encode()).hexdigest()[:8], 16)
        subnet = layout.subnet or free_subnet(seed % 256)
        # The addresses do not exist yet, so the ports are probed on all of the machine's.
        slurmctld_port, slurmd_port = daemons.free_ports("0.0.0.0", 20_000 + seed % 4_000 * 2)
        state = _State(
            layout=layout,
            subnet=subnet,
            slurmctld_port=slurmctld_port,
            slurmd_port=slurmd_port,
            slurm_version=daemons.slurm_version(),
            first_job_id=conf.first_job_id(time.time()),
        )
        self.directory.mkdir(parents=True)
        temporary = self.directory / "state.json.new"
        temporary.write_text(state.model_dump_json(indent=2) + "\n", encoding="utf-8")
        temporary.replace(self.directory / "state.json")
        return state

    def _start(self, state: _State, progress: Progress) -> None:
        changed = self._write_files(state)
        self._network.ensure(state.layout, state.subnet)
        env = self._daemon_env()
        if daemons.start_munged(self.directory, env):
            progress("munged started")
        nodes = [self.node(node.name) for node in state.layout.unrolled()]
        for node in nodes:
            if node.boot(env):
                progress(f"node {node.name}: booted")
        if daemons.start_slurmctld(self.directory, self.directory / "etc" / "hosts", env):
            progress(f"slurmctld started at {controller_address(state.subnet)}:{state.slurmctld_port}")
        for node in nodes:
            if node.start_slurmd(env):
                progress(f"node {node.name}: slurmd started")
        if changed:
            control.reconfigure(env)
        control.await_nodes(
            env,
            [node.name for node in nodes],
            timeout_s=60,
            progress=progress,
            lost=lambda name: last_line(self.directory / "nodes" / name / "slurmd.log"),
        )

    def _write_files(self, state: _State) -> bool:
        """Write configuration and device files that are missing or different; True if an existing one changed."""
        changed = False
        etc = self.directory / "etc"
        etc.mkdir(parents=True, exist_ok=True)
        endpoint = conf.Endpoint(
            subnet=state.subnet,
            slurmctld_port=state.slurmctld_port,
            slurmd_port=state.slurmd_port,
            first_job_id=state.first_job_id,
        )
        texts = {
            "slurm.conf": conf.slurm_conf(state.layout, endpoint, self.directory),
            "gres.conf": conf.gres_conf(state.layout, self.directory),
            "cgroup.conf": conf.cgroup_conf(state.slurm_version),
            "hosts": conf.hosts(state.layout, state.subnet, socket.gethostname()),
        }
        for name, text in texts.items():
            path = etc / name
            # Unchanged files keep their inode: hosts is bind-mounted in running nodes.
            old = path.read_text(encoding="utf-8") if path.exists() else None
            if old != text:
                path.write_text(text, encoding="utf-8")
                changed = changed or old is not None
        for node in state.layout.unrolled():
            for number, device in enumerate(conf.gpu_devices(node, self.directory)):
                if not device.exists():
                    device.parent.mkdir(parents=True, exist_ok=True)
                    # Major 240 is for local use: nothing answers there.
                    os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(240, number))
        return changed

    def _clean(self, progress: Progress) -> None:
        """Remove every trace, whatever state it is in. Order: nodes first, so that nothing restarts in between."""
        nodes = self.directory / "nodes"
        for path in sorted(nodes.iterdir()) if nodes.is_dir() else []:
            self.node(path.name).halt()
            progress(f"node {path.name}: stopped")
        inodes = self._network.inodes()
        strays = [identify(proc.pid) for proc in snapshot() if proc.net in inodes]
        end([process for process in strays if process is not None], grace_s=1)
        daemons.slurmctld(self.directory).stop(grace_s=5)
        daemons.munged(self.directory).stop(grace_s=2)
        self._network.remove()
        if self.directory.exists():
            shutil.rmtree(self.directory)
            progress(f"removed {self.directory}")

    def _daemon_env(self) -> dict[str, str]:
        """A clean environment: daemons must not inherit the caller's job."""
        path = f"{_SBIN}:/usr/local/bin:/usr/bin:/bin"
        return {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8", **self.env()}
