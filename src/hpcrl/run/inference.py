"""Wiring of an inference rank: MPI world, weight receiver, vLLM child, proxy, coordinator.

main thread       asyncio: Replica (vLLM child, proxy), metrics, end of run
receiver thread   all MPI calls: offers, chunks, verification           ◀── trainers
flip thread       FLIP (waits until the coordinator has drained this replica) → Replica.flip on the event loop → READY or REFUSED
asyncio tasks     ENDED: generations of attempts that are not wanted any more are dropped; LOAD: how full the KV cache is
dead engine       REGISTER (nothing is leased to it any more) → restart → READY for the last verified version
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from hpcrl.config import RunConfig
from hpcrl.errors import InfraError
from hpcrl.inference.gpus import given_by_slurm, own_gpus, visible_gpus
from hpcrl.inference.replica import Replica
from hpcrl.metrics import MetricsWriter
from hpcrl.protocol import client as api
from hpcrl.protocol import messages as m
from hpcrl.protocol.address import routable_address
from hpcrl.protocol.client import AsyncClient, Client
from hpcrl.protocol.keyfiles import read_keys
from hpcrl.protocol.rundir import RunDir
from hpcrl.run.ending import cancel_all
from hpcrl.run.load import report_load
from hpcrl.run.model_files import on_this_node
from hpcrl.run.replica_reports import ReplicaReports
from hpcrl.run.role import role_main
from hpcrl.run.unwanted import drop_unwanted
from hpcrl.run.world import join_world
from hpcrl.weights.adapter_store import AdapterStore
from hpcrl.weights.digest import base_digest, model_config_digest, tokenizer_digest
from hpcrl.weights.manifest import Manifest
from hpcrl.weights.mpi import World
from hpcrl.weights.receiver import Receiver, Timings
from hpcrl.weights.staging import Staging, remove_leftovers

__all__ = ["main"]

log = logging.getLogger("hpcrl.inference")

_METRICS_S = 5.0
_MANIFEST_S = 60.0


def work(run: RunDir, config: RunConfig, _: argparse.Namespace) -> None:
    """One inference rank from its first MPI call to its last."""
    world = join_world("inference", run, config)
    index = world.receivers.index(world.rank)
    _take_gpus(config, world)
    remove_leftovers()
    config = on_this_node(config)
    try:
        with ExitStack() as stack:
            staging = stack.enter_context(Staging(run.run_id, f"replica{index}"))
            adapters = None
            if config.lora is not None:
                adapters = stack.enter_context(AdapterStore(run.run_id, f"replica{index}"))
            asyncio.run(_Rank(run, config, world, staging, adapters, index).serve())
    except asyncio.CancelledError:
        # Stopped by the launcher or Slurm. Two copies of the model in /dev/shm must not outlive the rank: they are the node's memory.
        raise SystemExit(128 + signal.SIGTERM) from None
    world.close()


def _take_gpus(config: RunConfig, world: World) -> None:
    """Leave in this rank's environment, which its engines get, only the GPUs of its own. Raises EnvironmentFault.

    Started by mpiexec, trainers that use GPUs see the same ones and take the first (`run.trainer`); Slurm gives components their own.
    """
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        return
    node, given = next(ranks for ranks in world.nodes if world.rank in ranks), given_by_slurm(os.environ)
    here = [rank for rank in world.trainers if world.names[rank] == world.names[world.rank]]
    taken = len(here) if given is None and config.trainer.backend == "nccl" else 0
    per_replica = config.inference.tensor_parallel
    own = own_gpus(visible_gpus(os.environ, count), node.index(world.rank), per_replica, given=given, taken=taken)
    log.info("GPUs of this replica: %s", ",".join(own))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)


class _Rank:
    def __init__(
        self, run: RunDir, config: RunConfig, world: World, staging: Staging, adapters: AdapterStore | None, index: int
    ) -> None:
        self._run = run
        self._config = config
        self._world = world
        self._staging = staging
        self._adapters = adapters
        self._id = f"replica{index}"
        self._client = Client(run, "inference")
        self._metrics = MetricsWriter(run.root, "inference", index)
        self._metrics_lock = threading.Lock()

    async def serve(self) -> None:
        """Until the trainer says that it is over. Raises InfraError when the engine cannot be kept alive."""
        self._loop = asyncio.get_running_loop()
        serving = asyncio.current_task()
        if serving is not None:
            self._loop.add_signal_handler(signal.SIGTERM, self._stopped, serving)
        self._replica = Replica(
            self._config,
            secret=read_keys(self._run, "inference").proxies,
            replica_id=self._id,
            model=Path(self._config.model.path),
            initial_version=None,  # nothing is served before a verified flip, not even the start weights
            log_dir=self._run.logs("inference"),
            on_down=self._engine_down,
            on_restart=self._engine_restarted,
            on_broken=self._flip_broke,
            adapters=self._adapters,
        )
        self._reports = ReplicaReports(self._client, self._replica, self._id)
        try:
            log.info("engine started in %.1f s", await self._replica.start())
            url = await self._replica.serve(routable_address())
            await asyncio.to_thread(self._reports.register, url, socket.gethostname())
            log.info("%s serves %s", self._id, url)
            await self._until_over()
        finally:
            await self._replica.stop()
            self._write(self._counters())
            self._metrics.close()

    def _stopped(self, serving: asyncio.Task[None]) -> None:
        # Names first: stopping the engine takes seconds, and SIGKILL may follow sooner. The memory goes with the processes.
        for path in self._staging.paths:
            path.unlink(missing_ok=True)
        if self._adapters is not None:
            self._adapters.close()
        serving.cancel()

    async def _engine_down(self) -> None:
        await asyncio.to_thread(self._reports.down)

    async def _engine_restarted(self, version: str | None) -> None:
        log.info("%s is back with %s", self._id, version or "no version")
        await asyncio.to_thread(self._reports.restarted)

    async def _flip_broke(self, version: str, reason: str) -> None:
        log.error("%s serves nothing after the flip to %s: %s", self._id, version, reason)
        await asyncio.to_thread(self._reports.broken, version, reason)

    async def _until_over(self) -> None:
        received: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._receive, args=(received,), name="weights-receiver", daemon=True).start()
        client = AsyncClient(self._run, "inference")
        tasks = (
            asyncio.create_task(drop_unwanted(client, self._replica, self._id)),
            asyncio.create_task(report_load(client, self._replica, self._id)),
        )
        try:
            while True:
                waiting = {received, self._replica.failed, *tasks}
                done, _ = await asyncio.wait(waiting, timeout=_METRICS_S, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    future.result()
                if received in done:
                    return
                self._write(self._counters())
        finally:
            await cancel_all(tasks)
            await client.close()

    # ------------------------------------------------------------ receiver and flip threads

    def _receive(self, received: asyncio.Future[None]) -> None:
        try:
            self._receiver().run()
        except BaseException as error:  # noqa: BLE001 - handed to the main thread, which records it
            self._loop.call_soon_threadsafe(received.set_exception, error)
        else:
            self._loop.call_soon_threadsafe(received.set_result, None)

    def _receiver(self) -> Receiver:
        return Receiver(
            self._world,
            self._staging,
            window=self._config.weights.chunks_in_flight,
            tokenizer_digest=tokenizer_digest(self._config.model.path),
            model_config_digest=model_config_digest(self._config.model.path),
            base_digest=None if self._config.lora is None else base_digest(self._config.model.path),
            on_staged=self._flip,
            on_refused=self._refused,
        )

    def _flip(self, manifest: Manifest, staging: Path, timings: Timings) -> None:
        path = self._manifest_file(manifest.version)
        request = m.FlipRequest(replica_id=self._id, version=manifest.version)
        while not (grant := self._client.call(api.FLIP, request)).granted:
            log.info("%s waits for attempts to end before it takes %s", self._id, manifest.version)
        flip = asyncio.run_coroutine_threadsafe(
            self._replica.flip(manifest.version, path, staging, grant.keep), self._loop
        )
        flipped = flip.result()
        ready = m.ReplicaReady(
            replica_id=self._id,
            version=manifest.version,
            digest=timings.digest,
            transfer_s=timings.transfer_s,
            verify_s=timings.verify_s,
            pause_s=flipped.pause_s,
        )
        try:
            self._reports.ready(ready)
        except InfraError as error:
            # Not a refusal: the engine serves the new copy, only nobody can be told. The rank ends with this reason.
            raise RuntimeError(f"{self._id} serves {manifest.version} but cannot report it: {error}") from error
        self._write(
            {"transfer_s": timings.transfer_s, "verify_s": timings.verify_s, "flip_pause_s": flipped.pause_s},
            manifest.step,
        )
        log.info("%s serves %s (pause %.0f ms)", self._id, manifest.version, 1000 * flipped.pause_s)

    def _refused(self, version: str, reason: str) -> None:
        log.error("%s refuses %s: %s", self._id, version, reason)
        self._reports.refused(version, reason)

    def _manifest_file(self, version: str) -> Path:
        """The manifest was published before its bytes were sent, but a network file system may show it late."""
        path = self._run.manifests / f"{version}.json"
        deadline = time.monotonic() + _MANIFEST_S
        while not path.exists():
            if time.monotonic() > deadline:
                raise InfraError("no_manifest", f"{path} did not appear within {_MANIFEST_S:.0f} s")
            time.sleep(0.02)
        return path

    # ------------------------------------------------------------ metrics

    def _counters(self) -> dict[str, float]:
        stats = self._replica.stats
        return {
            "requests": stats.requests,
            "tokens_prompt": stats.tokens_prompt,
            "tokens_generated": stats.tokens_generated,
            "engine_restarts": self._replica.restarts,
        }

    def _write(self, values: dict[str, float], step: int | None = None) -> None:
        with self._metrics_lock:
            self._metrics.write(values, step)


def main() -> None:
    role_main("inference", work, argparse.ArgumentParser(prog="hpcrl.run.inference"))


if __name__ == "__main__":
    main()
