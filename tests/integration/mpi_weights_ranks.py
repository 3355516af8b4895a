"""The ranks of tests/integration/test_weights_mpi.py: trainers and receivers in one MPI world, one scenario per call.

``mpiexec -n N python -m mpi4py mpi_weights_ranks.py SCENARIO DIRECTORY TRAINERS ALGORITHM CHUNK_BYTES``
with EXPECTED_RANKS set; every rank writes what it saw to ``DIRECTORY/rank-N.json``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from hpcrl.errors import InfraError
from hpcrl.protocol.rundir import RunDir
from hpcrl.protocol.version import PolicyVersion
from hpcrl.weights.digest import chunk_digest
from hpcrl.weights.manifest import Manifest
from hpcrl.weights.mpi import World
from hpcrl.weights.outgoing import Outgoing
from hpcrl.weights.receiver import Receiver, Timings
from hpcrl.weights.sender import Publisher, PublishResult
from hpcrl.weights.snapshot import Snapshot
from hpcrl.weights.staging import Staging

MIB = 1 << 20


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
    }


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
    steps, scale = {"big": (3, 4000), "idle": (0, 1)}.get(scenario, (3, 1))
    if scenario == "big":
        values = {"model.layers.0.w": torch.randn(64 * MIB // 4)}
    else:
        values = tensors_of(0, scale)
    index = world.trainers.index(world.rank)
    snapshot = Snapshot(lambda: list(values.items()), index=index, count=len(world.trainers))
    kind = CorruptingPublisher if scenario == "corrupt" else Publisher
    announced: list[str] = []
    publisher = kind(
        world,
        run,
        snapshot,
        chunk_bytes=chunk_bytes,
        window=4,
        tokenizer_digest="t",
        model_config_digest="other" if scenario == "incompatible" else "c",
        algorithm=None if algorithm == "auto" else algorithm,
        on_manifest=lambda manifest: announced.append(manifest.version),
        timeout_s=60.0,
    )
    results = []
    for step in range(steps):
        if scenario != "big":
            values.update(tensors_of(step, scale))
        publisher.publish(PolicyVersion(0, step))
        if scenario == "slow_flip" and step == 0:
            continue  # the next publish meets a replica that still flips
        results.append(result_of(publisher.wait()))
    if scenario == "idle":
        time.sleep(2.0)
    if scenario == "flip_fails":
        time.sleep(0.6)  # past the look for late messages
    publisher.shutdown()
    return {"results": results, "announced": announced, "refusals": publisher.refusals}


def run_receiver(scenario: str, world: World, staging: Staging) -> dict[str, Any]:
    seen: list[dict[str, Any]] = []
    refused: list[list[str]] = []

    def on_staged(manifest: Manifest, path: Path, timings: Timings) -> None:
        data = path.read_bytes()
        equal = scenario == "big" or data == expected_bytes(manifest, tensors_of(manifest.step))
        seen.append(
            {"version": manifest.version, "path": path.name, "equal": equal, "mode": path.stat().st_mode & 0o777}
        )
        seen[-1] |= {"transfer_s": timings.transfer_s, "verify_s": timings.verify_s, "at": time.time()}
        if scenario == "slow_flip" and world.rank == world.receivers[0] and manifest.step == 0:
            time.sleep(1.0)
            seen[-1]["equal"] = path.read_bytes() == data  # nothing may write to a half that is being flipped to
        if scenario == "flip_fails" and manifest.step == 1 and world.rank == world.receivers[0]:
            raise InfraError("flip_failed", "the engine said no")

    receiver = Receiver(
        world,
        staging,
        window=4,
        tokenizer_digest="t",
        model_config_digest="c",
        on_staged=on_staged,
        on_refused=lambda version, reason: refused.append([version, reason]),
        timeout_s=60.0,
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


def main() -> None:
    scenario, directory, trainers, algorithm, chunk_bytes = sys.argv[1:]
    rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    role = "trainer" if rank < int(trainers) else "inference"
    expected = int(os.environ["EXPECTED_RANKS"])
    torch.set_num_threads(1)
    world = World.connect("trainer" if role == "trainer" else "inference", expected, name=f"{role}-{rank}")
    run = RunDir(Path(directory) / "run")
    if role == "trainer":
        assert world.bcast_json({"from": rank} if rank == 0 else None) == {"from": 0}
        seen = run_trainer(scenario, world, run, algorithm, int(chunk_bytes))
    else:
        staging_dir = Path(directory) / "shm" if scenario != "big" else Path("/dev/shm")
        staging_dir.mkdir(exist_ok=True)
        with Staging(run.run_id + str(os.getppid()), f"replica-{rank}", staging_dir) as staging:
            seen = run_receiver(scenario, world, staging)
    (Path(directory) / f"rank-{rank}.json").write_text(json.dumps(seen))
    world.close()


if __name__ == "__main__":
    main()
