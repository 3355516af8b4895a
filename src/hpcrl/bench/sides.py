"""What a sender and a receiver of the benchmark do in each phase. Each phase returns what this rank measured, in seconds.

raw       trainer 0 ─ MPI_Send ─▶ receiver 0                          the link and the MPI library, nothing else
publish   Publisher ─▶ Receiver; flip beside receiver 0 while a client draws tokens from it
load      the staged version loaded again, without a client           what any update of this engine has to pay
gloo      torch.distributed broadcast trainer 0 → receivers           baseline: bytes in host memory, unverified
file      trainer 0 writes safetensors; pause, fetch, vLLM's reload   baseline: what a shared directory offers
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, Protocol

import torch
from safetensors.torch import load_file, save_file

from hpcrl.bench.engine import Engine, longest_gap
from hpcrl.bench.files import FileServer, drop_cache, fetch, read_through
from hpcrl.bench.wire import Wire
from hpcrl.protocol.address import routable_address
from hpcrl.protocol.rundir import RunDir, publish_text
from hpcrl.protocol.version import PolicyVersion
from hpcrl.weights.manifest import Manifest
from hpcrl.weights.mpi import World
from hpcrl.weights.plan import Algorithm, LinkRate
from hpcrl.weights.receiver import Receiver, Timings
from hpcrl.weights.sender import Publisher
from hpcrl.weights.snapshot import Snapshot
from hpcrl.weights.staging import Staging

__all__ = ["Plan", "ReceiverSide", "SenderSide", "Side", "Values"]

Values = dict[str, float]

_DIGEST = "0" * 32
_GRACE_S = 600.0
_COPIES = 3
_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run measures. ``limited``: the links have a rate limit, so the file baseline crosses them too. ``baselines``: gloo and
    files are measured as well. ``threads``: the engine's.
    """

    model: str
    dtype: str
    senders: int
    receivers: int
    algorithm: Literal["auto", "star", "chain"]
    repeats: int
    limited: bool
    engine: bool
    threads: int
    baselines: bool

    @property
    def fixed(self) -> Algorithm | None:
        """The algorithm to use; None: the planner chooses."""
        return None if self.algorithm == "auto" else self.algorithm


class Side(Protocol):
    """One rank's phases."""

    nbytes: int

    def raw(self) -> Values: ...

    def publish(self, step: int) -> Values: ...

    def load(self, step: int) -> Values: ...

    def gloo(self) -> Values: ...

    def write(self) -> Values: ...

    def read(self) -> Values: ...


class SenderSide:
    """A trainer rank: holds the model's tensors; the first one also sends the baselines and writes the files."""

    def __init__(self, plan: Plan, directory: Path, world: World, wire: Wire) -> None:
        self._plan = plan
        self._world = world
        self._wire = wire
        self._run = RunDir(directory / "run")
        self._file = directory / "file" / _FILE
        dtype = getattr(torch, plan.dtype)
        self._tensors = {name: tensor.to(dtype) for name, tensor in load_file(Path(plan.model) / _FILE).items()}
        self._snapshot = Snapshot(
            lambda: self._tensors.items(), index=world.trainers.index(world.rank), count=len(world.trainers)
        )
        self._leads = world.rank == world.trainers[0]
        self.nbytes = self._snapshot.layout.nbytes
        self._flat = memoryview(bytearray(self.nbytes if self._leads else 0))
        self._link: LinkRate | None = None
        self._server: FileServer | None = None
        if self._leads:
            self._file.parent.mkdir()
        if self._leads and plan.limited:
            self._server = FileServer(routable_address(), self._file)
            host, port = self._server.address
            publish_text(directory / "file-server", f"{host} {port}")

    def raw(self) -> Values:
        self._wire.raw(self._flat)
        return {}

    def publish(self, step: int) -> Values:
        """The link is measured once, in the first publish, as in a run."""
        publisher = Publisher(
            self._world,
            self._run,
            self._snapshot,
            chunk_bytes=16 << 20,
            window=4,
            tokenizer_digest=_DIGEST,
            model_config_digest=_DIGEST,
            algorithm=self._plan.fixed,
            link=self._link,
        )
        copies = [_timed(self._snapshot.capture) for _ in range(_COPIES)]
        began = time.monotonic()
        publisher.publish(PolicyVersion(0, step))
        blocked = time.monotonic() - began
        result = publisher.wait()
        publisher.shutdown()
        self._link = publisher.link
        if result is None or len(result.verified) < self._plan.receivers:
            raise RuntimeError(f"publish {step} was not verified everywhere: {result}")
        values = {"began": began, "blocked_s": blocked, "snapshot_s": statistics.median(copies)}
        return values | {"transfer_verify_s": result.total_s, "wire_s": result.transfer_s}

    def load(self, step: int) -> Values:
        return {}

    def gloo(self) -> Values:
        self._wire.broadcast(self._flat)
        return {}

    def write(self) -> Values:
        if self._leads:
            save_file(self._tensors, str(self._file))
            drop_cache(self._file)
        return {}

    def read(self) -> Values:
        return {}


class ReceiverSide:
    """An inference rank. The first one serves an engine; the others verify and hold, so that the machine's cores measure links."""

    def __init__(self, plan: Plan, directory: Path, world: World, wire: Wire, staging: Staging, nbytes: int) -> None:
        self._plan = plan
        self._world = world
        self._wire = wire
        self._staging = staging
        self._run = RunDir(directory / "run")
        self._shared = directory / "file"
        self._server_file = directory / "file-server"
        self._here = Path("/dev/shm/hpcrl-bench-file")
        self._here.mkdir(exist_ok=True)
        self._staged: Path | None = None
        self._flipped = 0.0
        self.nbytes = nbytes
        self.engine: Engine | None = None

    def raw(self) -> Values:
        self._wire.raw(self._staging.standby(self.nbytes))
        return {}

    def publish(self, step: int) -> Values:
        receiver = Receiver(
            self._world,
            self._staging,
            window=4,
            tokenizer_digest=_DIGEST,
            model_config_digest=_DIGEST,
            on_staged=self._flip,
            grace_s=_GRACE_S,
        )
        if self.engine is None:
            receiver.run()
            return {"flipped": self._flipped}
        with self.engine.client() as times:
            receiver.run()
        gaps = {"pause_s": longest_gap(times), "token_s": _median_gap(times)}
        return {"flipped": self._flipped, "engine_rss": self.engine.resident()} | gaps

    def _flip(self, manifest: Manifest, path: Path, timings: Timings) -> None:
        if self.engine is not None:
            self.engine.flip(self._run.manifests / f"{manifest.version}.json", path)
        self._staged, self._flipped = path, time.monotonic()

    def load(self, step: int) -> Values:
        if self.engine is None or self._staged is None:
            return {}
        return {"load_only_s": self.engine.flip(self._run.manifests / f"0.{step}.json", self._staged).load_s}

    def gloo(self) -> Values:
        self._wire.broadcast(self._staging.standby(self.nbytes))
        return {}

    def write(self) -> Values:
        return {}

    def read(self) -> Values:
        if self.engine is None:
            self._fetch()
            if not self._plan.limited:
                read_through(self._shared / _FILE)
            return {}
        with self.engine.client() as times:
            self.engine.reload_file(self._here if self._plan.limited else self._shared, self._fetch)
        return {"file_pause_s": longest_gap(times)}

    def _fetch(self) -> None:
        if self._plan.limited:
            host, port = self._server_file.read_text(encoding="utf-8").split()
            fetch((host, int(port)), self._here / _FILE, self.nbytes)

    def close(self) -> None:
        (self._here / _FILE).unlink(missing_ok=True)
        self._here.rmdir()


def _timed(work: Callable[[], None]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _median_gap(times: list[float]) -> float:
    return statistics.median(after - before for before, after in pairwise(times))
