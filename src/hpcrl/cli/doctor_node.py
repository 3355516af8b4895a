"""The doctor's questions to one node, asked by a task of its job: ``python -m hpcrl.cli.doctor_node DIRECTORY ROLE [CONFIG]``.

    doctor, where it was called      DIRECTORY/stamp replaced five times a second      DIRECTORY/lock held
    task on each node                DIRECTORY/ports/NODE, then DIRECTORY/nodes/NODE.json, published by rename

ROLE is that of the component: ``mpi``, ``inference`` (vLLM is started), ``sandbox`` (a sandbox is started), or ``all`` without vLLM.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import resource
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from hpcrl.cli.doctor_checks import Fault, gpus, open_files, user_namespaces
from hpcrl.cli.doctor_table import asked
from hpcrl.config import RunConfig, load_config
from hpcrl.config.sections import SandboxSection
from hpcrl.errors import EnvironmentFault, InfraError
from hpcrl.protocol.address import routable_address
from hpcrl.protocol.rundir import publish_text

__all__ = ["main", "model_bytes"]

_GIB = 1 << 30
_CLOCK_S = 2.0
_STALE_S = 5.0
_GONE_S = 20.0
_VLLM_S = 150.0
_COPIES = 2
"""Of the weights, in /dev/shm of an inference node: the version that is served and the one that arrives."""


def model_bytes(config: RunConfig | None) -> int:
    """Bytes of the model's weights on disk; 0 without a configuration."""
    return 0 if config is None else sum(path.stat().st_size for path in Path(config.model.path).glob("*.safetensors"))


def shared_directory(folder: Path) -> str:
    """A file that is replaced elsewhere is seen anew, and a lock held elsewhere is seen."""
    stamp = folder / "stamp"
    first, began = stamp.read_text(encoding="ascii"), time.monotonic()
    while stamp.read_text(encoding="ascii") == first:
        if time.monotonic() - began > _GONE_S:
            raise Fault(
                f"a file replaced elsewhere is not seen within {_GONE_S:.0f} s",
                "mount the shared file system with attribute caching of a second or less (actimeo=1)",
                "admin",
            )
        time.sleep(0.02)
    delay = time.monotonic() - began
    with open(folder / "lock", "rb+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError as error:
            raise Fault(
                f"no file locks: {error.strerror}", "Lustre: mount with -o flock; NFS: run lockd", "admin"
            ) from error
        else:
            raise Fault(
                "a lock held on another node is not seen here", "Lustre: mount with -o flock, not localflock", "admin"
            )
    if delay > _STALE_S:
        raise Fault(f"a replaced file is seen after {delay:.1f} s", "lower actimeo/acregmax", "admin", slow=True)
    return "replaced files are seen at once, locks hold between nodes"


def clock(folder: Path) -> str:
    """Against the doctor's own: a stamp is never older than the time it takes to see a new one."""
    stamp = folder / "stamp"
    first, deadline = stamp.read_text(encoding="ascii"), time.monotonic() + _STALE_S
    while (now := stamp.read_text(encoding="ascii")) == first and time.monotonic() < deadline:
        time.sleep(0.02)
    off = time.time() - float(now)
    if abs(off) > _CLOCK_S and now != first:
        raise Fault(f"the clock is {off:+.1f} s off", "run chrony or ntpd on all nodes", "admin")
    return "agrees"


def ports(folder: Path, expected: int) -> str:
    """Every node reaches a freely chosen port of every other under the address that it would announce."""
    address, node = routable_address(), _name()
    if address.startswith("127."):
        raise Fault(
            "this node has no address but loopback",
            "set HPCRL_ADDRESS, or the host name's entry in /etc/hosts",
            "admin",
        )
    with socket.create_server((address, 0), backlog=256) as server:
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
        publish_text(folder / "ports" / node, f"{address} {server.getsockname()[1]}")
        deadline = time.monotonic() + _GONE_S
        while len(found := list((folder / "ports").glob("[!.]*"))) < expected and time.monotonic() < deadline:
            time.sleep(0.05)
        refused = []
        for path in found:
            host, port = path.read_text(encoding="ascii").split()
            try:
                socket.create_connection((host, int(port)), timeout=5.0).close()
            except OSError as error:
                refused.append(f"{path.name} ({host}:{port}: {error.strerror or error})")
        publish_text(folder / "done" / node, "")
        # Others may still be knocking.
        while len(list((folder / "done").glob("[!.]*"))) < len(found) and time.monotonic() < deadline:
            time.sleep(0.05)
    if refused:
        raise Fault(
            f"cannot reach {', '.join(refused)}",
            "open all ports above 1024 between the nodes of a job, or set HPCRL_ADDRESS to an address on an open network",
            "admin",
        )
    if len(found) < expected:
        raise Fault(f"{expected - len(found)} nodes did not come", "look at slurmd's log on them", "admin")
    return f"{address} reaches {len(found)} of {expected} nodes on free ports"


def _accept(server: socket.socket) -> None:
    while True:
        try:
            server.accept()[0].close()
        except OSError:
            return


def memory_files(role: str, config: RunConfig | None) -> str:
    needed = max(_GIB, _COPIES * model_bytes(config) * (config is not None and role == "inference"))
    free = shutil.disk_usage("/dev/shm").free
    if free < needed:
        raise Fault(
            f"/dev/shm has {free / _GIB:.1f} of {needed / _GIB:.1f} GiB free",
            f"{_COPIES} copies of the model must fit; remove leftovers (slurm/epilog.d/hpcrl-memory), or mount it with size=",
            "admin",
        )
    return f"{free / _GIB:.0f} GiB free"


def scratch() -> str:
    from hpcrl.sandbox.sweep import default_base

    place = default_base().parent
    free = shutil.disk_usage(place).free
    if free < _GIB:
        raise Fault(
            f"{place} has {free / _GIB:.1f} GiB free", "clean it, or set HPCRL_SCRATCH to a larger local disk", "user"
        )
    return f"{place} has {free / _GIB:.0f} GiB free"


def limits() -> str:
    """Memory that may be locked matters only with InfiniBand."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    fabric = Path("/sys/class/infiniband")
    if soft != resource.RLIM_INFINITY and fabric.is_dir() and any(fabric.iterdir()):
        raise Fault(
            f"only {soft >> 10} KiB may be locked in memory, and InfiniBand needs it",
            "set LimitMEMLOCK=infinity for slurmd, and PropagateResourceLimitsExcept=MEMLOCK",
            "admin",
            slow=True,
        )
    return f"{open_files()} open files"


def cgroups() -> str:
    """What of this task's cgroup it may govern itself. Nothing is needed: without, limits are kept by rlimits and a watcher."""
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return "version 1 or none: sandboxes are limited by rlimits and a watcher"
    own = Path("/proc/self/cgroup").read_text(encoding="ascii").strip().rpartition(":")[2]
    place = Path("/sys/fs/cgroup") / own.lstrip("/")
    if not os.access(place / "cgroup.procs", os.W_OK):
        return "version 2, not delegated: sandboxes are limited by rlimits and a watcher"
    return f"version 2, delegated: {(place / 'cgroup.controllers').read_text(encoding='ascii').strip() or 'no controllers'}"


def cards(role: str) -> str:
    """GPUs as nvidia-smi and torch see them."""
    seen = gpus()
    if seen == "none here" or role == "sandbox":
        return seen
    import torch

    if not torch.cuda.is_available():
        raise Fault(f"{seen}, but torch sees none", "install a CUDA build of torch that this driver can run", "user")
    return f"{seen}; NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"  # type: ignore[no-untyped-call]


def sandbox(config: RunConfig | None) -> str:
    """The image is there and can be mounted; from inside, nothing of the node or of any network is seen."""
    from hpcrl.sandbox.base import SandboxSpec
    from hpcrl.sandbox.check import preflight
    from hpcrl.sandbox.images import resolve
    from hpcrl.sandbox.pool import SandboxPool

    if shutil.which("apptainer") is None:
        raise Fault("apptainer is not on PATH", "load its module, or have it installed", "user")
    image = resolve((config.sandbox if config is not None else SandboxSection()).image)

    async def look() -> str:
        await preflight(image)
        async with (
            SandboxPool(backend="apptainer", start_concurrency=1) as pool,
            pool.sandbox(SandboxSpec(image=image.path), "doctor") as box,
        ):
            return (await box.run("cat /proc/net/dev", timeout_s=20.0)).output

    seen = asyncio.run(look())
    links = [line.split(":")[0].strip() for line in seen.splitlines() if ":" in line]
    if [link for link in links if link not in ("lo", "tunl0", "sit0", "ip6tnl0")]:
        raise Fault(
            f"a sandbox sees the network: {', '.join(links)}", "update Apptainer (--net --network none)", "admin"
        )
    return "a sandbox starts, without a network"


def vllm(config: RunConfig, folder: Path) -> str:
    """Started as a replica is, with this model, up to its first token."""
    from hpcrl.inference.supervisor import VllmServer

    section = config.inference.model_copy(update={"start_timeout_s": min(config.inference.start_timeout_s, _VLLM_S)})
    short = config.model_copy(update={"inference": section})

    async def start() -> float:
        server = VllmServer(short, Path(config.model.path), "0.0", folder / f"vllm-{_name()}.log")
        try:
            return await server.start()
        finally:
            await server.stop()

    try:
        return f"first token after {asyncio.run(start()):.0f} s"
    except InfraError as error:
        raise Fault(
            " ".join(str(error).split())[-400:], "see docs/gpu.md; try inference.enforce_eager: true", "user"
        ) from error


def _name() -> str:
    return socket.gethostname().split(".")[0]


def questions(folder: Path, role: str, config: RunConfig | None, expected: int) -> dict[str, Callable[[], str]]:
    """Name → check of a node with this role."""
    found: dict[str, Callable[[], str]] = {
        "ports between nodes": partial(ports, folder, expected),
        "shared directory on nodes": partial(shared_directory, folder),
        "clocks of nodes": partial(clock, folder),
        "limits on nodes": limits,
        "/dev/shm of nodes": partial(memory_files, role, config),
        "GPUs of nodes": partial(cards, role),
    }
    if role in ("sandbox", "all"):
        found |= {
            "scratch of nodes": scratch,
            "user namespaces on nodes": user_namespaces,
            "cgroups on nodes": cgroups,
            "sandboxes on nodes": partial(sandbox, config),
        }
    if role == "inference" and config is not None:
        found["vLLM on a node"] = partial(vllm, config, folder)
    return found


def main() -> None:
    folder, role, expected = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    try:
        config = load_config(Path(sys.argv[4])) if len(sys.argv) > 4 else None
    except EnvironmentFault as error:
        raise SystemExit(str(error)) from error
    rows = [asdict(asked(name, check)) for name, check in questions(folder, role, config, expected).items()]
    publish_text(folder / "nodes" / f"{_name()}.json", json.dumps(rows))


if __name__ == "__main__":
    main()
