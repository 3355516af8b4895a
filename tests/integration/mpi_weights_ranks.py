"""The ranks of tests/integration/test_weights_mpi.py: trainers and receivers in one MPI world, one scenario per call.

``mpiexec -n N python -m mpi4py mpi_weights_ranks.py SCENARIO DIRECTORY TRAINERS ALGORITHM CHUNK_BYTES``
with EXPECTED_RANKS set; every rank writes what it saw to ``DIRECTORY/rank-N.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hpcrl.errors import HpcrlError, InfraError
from hpcrl.protocol.rundir import RunDir
from hpcrl.protocol.version import PolicyVersion
from hpcrl.weights.digest import chunk_digest
from hpcrl.weights.manifest import Adapter, Manifest
from hpcrl.weights.mpi import World
from hpcrl.weights.outgoing import Outgoing
from hpcrl.weights.receiver import Receiver, Timings
from hpcrl.weights.sender import Publisher, PublishResult
from hpcrl.weights.snapshot import Snapshot
from hpcrl.weights.staging import Staging

MIB = 1 << 20
WIDTHS = {"sharded": 37, "sharded_big": 1 << 20}


def tensors_of(step: int, scale: int = 1) -> dict[str, torch.Tensor]:
    """Random tensors of mixed type, empty and non-contiguous ones among them; the same on every rank."""
    generator = torch.Generator().manual_seed(step)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "lm_head.weight": rand(7, 9),
        "model.layers.1.w": rand(64 * scale, 33).bfloat16(),
        "model.layers.0.w": rand(40, 64 * scale).t(),
        "model.layers.0.none": rand(0, 5),
        "model.layers.0.one": rand(),
        "model.norm.weight": rand(13).half(),
        "model.layers.0.ids": torch.arange(step, step + 11),
        "model.layers.1.q": torch.arange(-70, 71, dtype=torch.int8).roll(step),
        "model.layers.1.conv": rand(1, 3, 5).half().transpose(1, 2),
    }


class Sharded(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, a persistent buffer, mixed shapes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(width + 3, 32)
        self.layers = nn.ModuleList([nn.Linear(32, width, bias=True), nn.Linear(width, 1, bias=True)])
        self.register_buffer("scale", torch.arange(5.0))

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """Whole, as ``step`` calls of :meth:`advance` leave them."""
        found = {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}
        for _ in range(step):
            for name, _ in self.named_parameters():
                found[name] += 1
        return found

    @torch.no_grad()
    def advance(self) -> None:
        for parameter in self.parameters():
            parameter.add_(1)


def sharded(world: World, directory: Path, width: int) -> Sharded:
    """The model under FSDP2; with four trainers two replicas of two shards (HSDP)."""
    count = len(world.trainers)
    dist.init_process_group("gloo", init_method=f"file://{directory}/gloo", rank=world.rank, world_size=count)
    mesh = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        if count == 4
        else init_device_mesh("cpu", (count,))
    )
    model = Sharded(width)
    fully_shard(model, mesh=mesh)
    return model


def peak_bytes() -> int:
    """Largest resident set since the last call."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


def publish_sharded(world: World, directory: Path, run: RunDir, chunk_bytes: int, width: int) -> dict[str, Any]:
    """Three steps of a sharded model; how much memory a publish takes beside the rank's own part."""
    model = sharded(world, directory, width)
    snapshot = Snapshot.of_model(model, index=world.trainers.index(world.rank), count=len(world.trainers))
    publisher = Publisher(
        world, run, snapshot, chunk_bytes=chunk_bytes, window=4, tokenizer_digest="t", model_config_digest="c"
    )
    peak_bytes()
    before = peak_bytes()
    results = []
    for step in range(3):
        publisher.publish(PolicyVersion(0, step))
        results.append(result_of(publisher.wait()))
        model.advance()
    publisher.shutdown()
    extra = peak_bytes() - before - len(snapshot.view)
    dist.destroy_process_group()
    return {"results": results, "extra": extra, "part": len(snapshot.view), "whole": snapshot.layout.nbytes}


def expected_bytes(manifest: Manifest, tensors: dict[str, torch.Tensor]) -> bytes:
    """The flat copy, put together without the code under test."""
    flat = bytearray(manifest.nbytes)
    for entry in manifest.tensors:
        raw = (
            tensors[entry.name].contiguous().flatten().view(torch.uint8)
            if entry.nbytes
            else torch.empty(0, dtype=torch.uint8)
        )
        flat[entry.offset : entry.offset + entry.nbytes] = raw.numpy().tobytes()
    return bytes(flat)


class DyingOutgoing(Outgoing):
    """The power goes after a few chunks."""

    def _bytes(self, number: int) -> memoryview:
        if number == len(self.pieces) - 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._bytes(number)


class DyingPublisher(Publisher):
    published = 0

    def _outgoing(self, chunk_bytes: int) -> Outgoing:
        outgoing = super()._outgoing(chunk_bytes)
        self.published += 1
        if self.published == 2 and not self._leads:
            return DyingOutgoing(self._world, self._snapshot, outgoing.pieces, self._window)
        return outgoing


class FailingReceiver(Receiver):
    """Version 0.1: dies, or takes nothing, when the chunks begin to flow."""

    def __init__(self, *args: Any, how: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self._how = how

    def _receive(self, offer: Any, order: dict[str, Any]) -> None:
        if offer.version == "0.1" and self._how == "receiver_dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if offer.version == "0.1" and self._how == "receiver_hangs":
            time.sleep(3600)
        super()._receive(offer, order)


class OddReceiver(Receiver):
    """After its flip to 0.0 it sends what no trainer understands."""

    def _after_flip(self) -> bool:
        flipped = super()._after_flip()
        if flipped and self.active is not None and self.active.manifest.version == "0.0":
            self._reply({"type": "odd"})
        return flipped


class CorruptingOutgoing(Outgoing):
    """The bytes that leave differ in one place from those that were digested."""

    def _bytes(self, number: int) -> memoryview:
        data = super()._bytes(number)
        if number == 0:
            self.altered = bytearray(data)
            self.altered[5] ^= 0xFF
            return memoryview(self.altered)
        return data


class CorruptingPublisher(Publisher):
    """Corrupts version 0.1 on its way."""

    published = 0

    def _outgoing(self, chunk_bytes: int) -> Outgoing:
        outgoing = super()._outgoing(chunk_bytes)
        self.published += 1
        if self.published == 2:
            return CorruptingOutgoing(self._world, self._snapshot, outgoing.pieces, self._window)
        return outgoing


def damage_manifests(world: World, scenario: str) -> None:
    """What is said of version 0.1 arrives changed: a tensor's name, or consistently of another tokenizer than was offered."""
    send = world.send_json

    def send_json(dests: Any, message: dict[str, Any]) -> None:
        if message["type"] == "manifest" and message["version"] == "0.1":
            content = json.loads(json.dumps(message["manifest"]))
            if scenario == "manifest_damaged":
                content["tensors"][0]["name"] = "model.layers.0.other"
            else:
                content = replace(Manifest.from_dict(content), tokenizer_digest="other").to_dict()
            message = message | {"manifest": content}
        send(dests, message)

    world.send_json = send_json  # type: ignore[method-assign]


def failure_of(publisher: Publisher) -> str:
    """What a training thread hears that waits for something else meanwhile."""
    deadline = time.monotonic() + 30.0
    try:
        while time.monotonic() < deadline:
            publisher.check()
            time.sleep(0.01)
    except HpcrlError as error:
        with suppress(HpcrlError):
            publisher.shutdown()
        return str(error)
    return "nothing"


def result_of(result: PublishResult | None) -> dict[str, Any]:
    assert result is not None
    return {
        "version": result.version,
        "digest": result.digest,
        "verified": list(result.verified),
        "refused": result.refused,
        "transfer_s": result.transfer_s,
        "total_s": result.total_s,
    }


def run_trainer(scenario: str, world: World, run: RunDir, algorithm: Any, chunk_bytes: int) -> dict[str, Any]:
    steps, scale = {"big": (3, 4000), "idle": (0, 1), "shared_node_fails": (4, 1)}.get(scenario, (3, 1))
    if scenario == "big":
        values = {"model.layers.0.w": torch.randn(64 * MIB // 4)}
    else:
        values = tensors_of(0, scale)
    index = world.trainers.index(world.rank)
    snapshot = Snapshot(lambda: list(values.items()), index=index, count=len(world.trainers))
    kind = {"corrupt": CorruptingPublisher, "sender_dies": DyingPublisher}.get(scenario, Publisher)
    announced: list[str] = []

    def announce(manifest: Manifest) -> None:
        if scenario == "not_announced" and manifest.step == 1:
            raise InfraError("unreachable", "the coordinator is away")
        announced.append(manifest.version)

    if scenario.startswith("manifest_"):
        damage_manifests(world, scenario)
    publisher = kind(
        world,
        run,
        snapshot,
        chunk_bytes=chunk_bytes,
        window=4,
        tokenizer_digest="other" if scenario in ("tokenizer", "shared_node_tokenizer") else "t",
        model_config_digest="other" if scenario == "incompatible" else "c",
        adapter=Adapter({}, "other") if scenario == "base" else None,
        algorithm=None if algorithm == "auto" else algorithm,
        on_manifest=announce,
        timeout_s=3.0 if scenario == "receiver_hangs" else 60.0,
    )
    results = []
    for step in range(steps):
        if scenario != "big":
            values.update(tensors_of(step, scale))
        publisher.publish(PolicyVersion(0, step))
        if scenario == "not_announced" and step == 1:
            return {"failed": failure_of(publisher)}
        if scenario == "slow_flip" and step == 0:
            continue  # the next publish meets a replica that still flips
        results.append(result_of(publisher.wait()))
        if scenario == "odd_message":
            time.sleep(0.6)  # past the look for late messages
    if scenario == "idle":
        time.sleep(2.0)
    if scenario in ("flip_fails", "shared_node_fails", "shared_node_tokenizer"):
        time.sleep(0.6)  # past the look for late messages
    publisher.shutdown()
    return {"results": results, "announced": announced, "refusals": publisher.refusals}


def run_receiver(scenario: str, world: World, staging: Staging, directory: Path) -> dict[str, Any]:
    model = Sharded(WIDTHS[scenario]) if scenario in WIDTHS else None
    seen: list[dict[str, Any]] = []
    refused: list[list[str]] = []
    held: list[tuple[Path, bytes]] = []

    def on_staged(manifest: Manifest, path: Path, timings: Timings) -> None:
        data = path.read_bytes()
        with (directory / "staged").open("a") as file:
            file.write(f"{world.rank} {manifest.version}\n")
        expected = model.tensors(manifest.step) if model is not None else tensors_of(manifest.step)
        equal = scenario == "big" or data == expected_bytes(manifest, expected)
        seen.append(
            {"version": manifest.version, "path": path.name, "equal": equal, "mode": path.stat().st_mode & 0o777}
        )
        seen[-1] |= {"transfer_s": timings.transfer_s, "verify_s": timings.verify_s, "at": time.time()}
        # What this replica would be loaded from if its engine died now.
        seen[-1]["reloadable"] = all(old.read_bytes() == content for old, content in held[-1:])
        seen[-1]["files"] = len(list(path.parent.iterdir()))
        if scenario == "slow_flip" and world.rank == world.receivers[0] and manifest.step == 0:
            time.sleep(1.0)
            seen[-1]["equal"] = path.read_bytes() == data  # nothing may write to a half that is being flipped to
        if scenario == "shared_node" and world.rank == world.receivers[1]:
            time.sleep(0.5)
            seen[-1]["equal"] = path.read_bytes() == data  # the copy stays until the last replica of the node has it
        if scenario in ("flip_fails", "shared_node_fails") and manifest.step == 1 and world.rank == world.receivers[0]:
            raise InfraError("flip_failed", "the engine said no")
        held.append((path, data))

    options: dict[str, Any] = {}
    if scenario in ("receiver_dies", "receiver_hangs"):
        options["how"] = scenario if world.rank == world.receivers[0] else ""
    kind = {"odd_message": OddReceiver}.get(scenario, FailingReceiver if options else Receiver)
    receiver = kind(
        world,
        staging,
        **options,
        window=4,
        tokenizer_digest="t",
        model_config_digest="c",
        base_digest="b" if scenario == "base" else None,
        on_staged=on_staged,
        on_refused=lambda version, reason: refused.append([version, reason]),
        timeout_s=60.0,
        grace_s=120.0,  # what is compared here takes long where the machine is busy
    )
    thread = threading.Thread(target=receiver.run)
    cpu, started = time.process_time(), time.monotonic()
    thread.start()
    thread.join()
    share = (time.process_time() - cpu) / (time.monotonic() - started)
    active = receiver.active
    return {
        "seen": seen,
        "refused": refused,
        "cpu_share": share,
        "active": active and active.manifest.version,
        "active_digest": active and chunk_digest(active.path.read_bytes()),
        "active_path": active and active.path.name,
    }


def wait_for_files(paths: list[Path]) -> None:
    deadline = time.monotonic() + 30
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all of {paths} after 30 s")
        time.sleep(0.01)


def main() -> None:
    scenario, directory, trainers, algorithm, chunk_bytes = sys.argv[1:]
    rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    role = "trainer" if rank < int(trainers) else "inference"
    expected = int(os.environ["EXPECTED_RANKS"])
    torch.set_num_threads(1)
    name = f"{role}-node" if scenario.startswith("shared_node") else f"{role}-{rank}"
    world = World.connect("trainer" if role == "trainer" else "inference", expected, name=name)
    run = RunDir(Path(directory) / "run")
    if scenario in WIDTHS and role == "trainer":
        seen = publish_sharded(world, Path(directory), run, int(chunk_bytes), WIDTHS[scenario])
    elif role == "trainer":
        assert world.bcast_json({"from": rank} if rank == 0 else None) == {"from": 0}
        seen = run_trainer(scenario, world, run, algorithm, int(chunk_bytes))
    else:
        staging_dir = Path(directory) / "shm" if scenario != "big" else Path("/dev/shm")
        staging_dir.mkdir(exist_ok=True)
        with Staging(run.run_id + str(os.getppid()), f"replica-{rank}", staging_dir) as staging:
            seen = run_receiver(scenario, world, staging, Path(directory))
            if scenario.startswith("shared_node"):
                # The node's copy goes with the rank that owns it: not before the others have read it.
                (Path(directory) / f"done-{rank}").touch()
                wait_for_files([Path(directory) / f"done-{other}" for other in world.receivers])
    (Path(directory) / f"rank-{rank}.json").write_text(json.dumps(seen))
    world.close()


if __name__ == "__main__":
    main()
