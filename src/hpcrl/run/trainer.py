"""Wiring of a trainer rank: MPI world, torch.distributed group, model, publisher, coordinator.

    python -m mpi4py -m hpcrl.run.trainer --run-dir runs/RUN      in one MPI world with the inference ranks

The trainers meet at an address and port that trainer 0 chooses and hands round by MPI.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.config import RunConfig
from hpcrl.protocol import client as api
from hpcrl.protocol import messages as m
from hpcrl.protocol.address import routable_address
from hpcrl.protocol.client import Client
from hpcrl.protocol.rundir import RunDir, publish_text
from hpcrl.run.model_files import on_this_node
from hpcrl.run.role import role_main
from hpcrl.run.world import join_world
from hpcrl.weights.adapter import peft_config
from hpcrl.weights.digest import model_config_digest, tokenizer_digest
from hpcrl.weights.manifest import Adapter, Manifest

if TYPE_CHECKING:
    from hpcrl.trainer.model import Policy
    from hpcrl.weights.snapshot import Snapshot

__all__ = ["main"]

log = logging.getLogger("hpcrl.trainer")

_MIB = 1 << 20
_BACKLOG = 4096
_PUBLISH_S = 300.0
"""Longest silence while a version is published, beside what a replica may take for the version before."""


def work(run: RunDir, config: RunConfig, _: argparse.Namespace) -> None:
    """One trainer rank from its first MPI call to its last."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    world = join_world("trainer", run, config)

    # torch loads only now: a wrong MPI is told before minutes of imports and model loading.
    from hpcrl.trainer.distributed import Ranks
    from hpcrl.trainer.loop import Trainer
    from hpcrl.weights.sender import Publisher

    index = world.trainers.index(world.rank)
    if config.trainer.backend == "nccl":
        _bind_gpu()
    listener = _listen() if index == 0 else None
    address, port = world.bcast_json(listener and listener.getsockname())
    ranks = Ranks.connect(index, len(world.trainers), address, port, backend=config.trainer.backend, listener=listener)
    client = Client(run, "trainer") if index == 0 else None
    trainer = Trainer(on_this_node(config), run, ranks, client, should_stop=lambda: stop.is_set() or run.stop.exists())

    def announce(manifest: Manifest) -> None:
        if client is not None:
            published = m.VersionPublished(version=manifest.version, digest=manifest.digest, nbytes=manifest.nbytes)
            client.call(api.PUBLISHED, published)

    parent = trainer.parent_version
    publisher = Publisher(
        world,
        run,
        _snapshot(config, trainer.policy.model, index, len(world.trainers)),
        chunk_bytes=int(config.weights.chunk_mib * _MIB),
        window=config.weights.chunks_in_flight,
        tokenizer_digest=tokenizer_digest(config.model.path),
        model_config_digest=model_config_digest(config.model.path),
        adapter=_adapter(config, trainer.base_digest),
        parent=None if parent is None else str(parent),
        on_manifest=announce,
        timeout_s=_patience(config),
    )
    result = trainer.run(publisher)
    publisher.shutdown()
    for replica, (version, reason) in publisher.refusals.items():
        log.warning("replica at rank %d refused %s: %s", replica, version, reason)
    if ranks.leads:
        log.info("done: %s; weights in %s", result, _export(run, config, trainer.policy, result["version"]))
        publish_text(run.trained, json.dumps(result) + "\n")
    ranks.close()
    if client is not None:
        client.close()
    world.close()


def _patience(config: RunConfig) -> float:
    """Longest silence of a replica, seconds: it may have to drain, and to start a new engine because its flip has failed."""
    return config.weights.drain_timeout_s + config.inference.start_timeout_s + _PUBLISH_S


def _listen() -> socket.socket:
    """Where the trainers meet. Held from here on: a port that is only known to be free may be taken before it is used."""
    return socket.create_server((routable_address(), 0), backlog=_BACKLOG)


def _snapshot(config: RunConfig, model: Any, index: int, count: int) -> Snapshot:
    """This rank's part of what is published: the whole model, or its adapter."""
    from hpcrl.trainer.lora import adapter_tensors
    from hpcrl.weights.snapshot import Snapshot

    if config.lora is None:
        return Snapshot.of_model(model, config.model.dtype, index=index, count=count)
    on_gpu = next(model.parameters()).is_cuda
    return Snapshot(lambda: adapter_tensors(model), config.model.dtype, on_gpu, index=index, count=count)


def _adapter(config: RunConfig, base_digest: str | None) -> Adapter | None:
    """What the published tensors are. Only trainer 0, which writes the manifest, knows the base model's digest."""
    lora = config.lora
    if lora is None or base_digest is None:
        return None
    config_of_peft = peft_config(config.model.path, lora.rank, lora.alpha, lora.target_modules)
    return Adapter(config=config_of_peft, base_digest=base_digest)


def _export(run: RunDir, config: RunConfig, policy: Policy, version: str) -> Path:
    """The weights as a Hugging Face directory, which is returned; with adapters these merged, and beside it the adapter itself."""
    from hpcrl.trainer.lora import export_adapter
    from hpcrl.trainer.model import export_hf

    adapter, model = run.adapter(version), run.model(version)
    if config.lora is not None and not adapter.exists():
        export_adapter(policy.model, config.lora, config.model.path, config.model.dtype, adapter)
    if not model.exists():
        export_hf(policy, Path(config.model.path), model)
    return model


def _bind_gpu() -> None:
    """One process per GPU: by the rank on this node, unless the site's binding already shows each process a single one."""
    import torch

    local = int(os.environ.get("SLURM_LOCALID") or os.environ.get("MPI_LOCALRANKID") or 0)
    torch.cuda.set_device(local % torch.cuda.device_count())


def main() -> None:
    role_main("trainer", work, argparse.ArgumentParser(prog="hpcrl.run.trainer"))


if __name__ == "__main__":
    main()
