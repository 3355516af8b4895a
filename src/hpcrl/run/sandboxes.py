"""From the run's configuration to sandboxes: what worker and scorer share. Images are resolved once per name and process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from hpcrl.config import RunConfig
from hpcrl.errors import EnvironmentFault, InfraError, UserError
from hpcrl.metrics.sink import Value
from hpcrl.sandbox.artifact import pack
from hpcrl.sandbox.check import preflight
from hpcrl.sandbox.images import Image, resolve
from hpcrl.sandbox.limits import Limits
from hpcrl.sandbox.pool import SandboxPool
from hpcrl.sandbox.sweep import default_base
from hpcrl.sandbox.tasks import Task

__all__ = [
    "Images",
    "empty_artifact",
    "limits_of",
    "node_arguments",
    "open_pool",
    "pool_values",
    "process_name",
    "unusable",
]

log = logging.getLogger(__name__)

_MIB = 1024 * 1024


def limits_of(config: RunConfig) -> Limits:
    """The run's limits of one sandbox."""
    sandbox = config.sandbox
    return Limits(
        command_timeout_s=sandbox.command_timeout_s,
        output_bytes=sandbox.output_bytes,
        memory_bytes=sandbox.memory_mib * _MIB,
        file_bytes=sandbox.disk_mib * _MIB,
        disk_bytes=sandbox.disk_mib * _MIB,
        processes=sandbox.processes,
        open_files=sandbox.open_files,
    )


class Images:
    """Image of a task: its own, or the run's. None under the process backend, which has none."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._found: dict[tuple[str, Path | None], asyncio.Task[Image]] = {}

    async def of(self, task: Task | None) -> Image | None:
        """The image of ``task`` (None: the run's). The first call may take as long as a build.

        Raises UserError, EnvironmentFault.
        """
        if self._config.sandbox.backend == "process":
            return None
        key: tuple[str, Path | None] = (self._config.sandbox.image, None)
        if task is not None and task.image is not None:
            key = (task.image, task.directory)
        resolving = self._found.get(key)
        if resolving is None:
            resolving = self._found[key] = asyncio.create_task(asyncio.to_thread(resolve, *key))
            resolving.add_done_callback(lambda done: self._forget_failed(key, done))
        return await asyncio.shield(resolving)

    async def for_attempt(self, task: Task) -> Image | None:
        """As :meth:`of`; a machine that cannot provide the image now fails the attempt only. Raises UserError, InfraError("image")."""
        try:
            return await self.of(task)
        except EnvironmentFault as error:
            raise InfraError("image", str(error)) from error

    def _forget_failed(self, key: tuple[str, Path | None], done: asyncio.Task[Image]) -> None:
        """The next attempt tries again: a full disk or a registry that was away may have recovered."""
        if done.cancelled() or done.exception() is not None:
            del self._found[key]


@asynccontextmanager
async def open_pool(config: RunConfig, images: Images) -> AsyncIterator[SandboxPool]:
    """The process's pool. One sandbox is tried first: a node that cannot start any must not burn every attempt it is given.

    Raises UserError, EnvironmentFault.
    """
    image = await images.of(None)
    sandbox = config.sandbox
    async with SandboxPool(
        backend=sandbox.backend, start_concurrency=sandbox.start_concurrency, warm=sandbox.warm
    ) as pool:
        found = await preflight(image, config.sandbox.backend, default_base(), limits_of(config), config.limits.strict)
        for gap in found:
            log.warning("not enforced on this node: %s", gap.what)
        yield pool


def pool_values(pool: SandboxPool) -> dict[str, Value]:
    """How often a sandbox stood ready so far, as metrics."""
    return {"pool_hits": pool.taken, "pool_misses": pool.missed}


def empty_artifact() -> bytes:
    """The artifact of an attempt that changed nothing."""
    with tempfile.TemporaryDirectory() as folder:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return pack(descriptor, lambda _: True, (), 1)
        finally:
            os.close(descriptor)


def unusable(error: UserError) -> InfraError:
    """A task that was accepted when the run began cannot be read now: not the policy's doing."""
    return InfraError("bad_task", str(error))


def node_arguments(prog: str) -> argparse.ArgumentParser:
    """Arguments of a process that runs several times per node."""
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument(
        "--index",
        type=int,
        default=int(os.environ.get("SLURM_LOCALID", "0")),
        help="number of this process on its node",
    )
    parser.add_argument("--job", metavar="ID", help="the process joins the run from this job of its own")
    return parser


def process_name(index: int, job: str | None = None) -> str:
    """Name of a worker or scorer, unique in the run. Examples: ``cpu1-0``; ``cpu1-0-j45`` of a job that joined it."""
    return f"{socket.gethostname().split('.')[0]}-{index}{f'-j{job}' if job else ''}"
