"""Wiring of the coordinator process: configuration, database, queue, HTTP server, announcement.

    python -m hpcrl.run.coordinator --run-dir runs/RUN --host 10.77.0.1 [--port 0] [--resume]

Ends with code 0 after SIGTERM or SIGINT, with 3 when the database cannot be opened or written. A restart on the same run directory
goes on where the last commit was. ``--resume`` opens a run again that was finished before (a requeued job).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import uvicorn
import uvloop

from hpcrl.clock import SystemClock
from hpcrl.config import load_config
from hpcrl.coordinator.api import Api
from hpcrl.coordinator.database import open_database, require_locks
from hpcrl.coordinator.queue import Queue
from hpcrl.coordinator.restore import restore
from hpcrl.coordinator.service import Service
from hpcrl.coordinator.store import Store
from hpcrl.coordinator.tasks import find_tasks
from hpcrl.errors import EnvironmentFault, HpcrlError
from hpcrl.protocol.keys import proxy_secret
from hpcrl.protocol.rundir import RunDir
from hpcrl.run.role import record_failure

__all__ = ["main", "serve"]

log = logging.getLogger("hpcrl.coordinator")

_BACKLOG = 2048
_GRACE_S = 5


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, which would end the process before the database is closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise EnvironmentFault(
            f"cannot listen on {host}:{port}: {error.strerror}; --host must be an address of this machine"
        ) from error
    listener.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
    )  # accepted connections inherit it; asyncio would not set it
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def _collect_rarely() -> None:
    """Whole collections stop every call for as long as they look at all that is in flight (80 ms at 2,000 rollouts per second).

    The queue leaves no cycles, so they are hardly needed: one in 2 million allocations. What was restored is not looked at again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 10, 100)


async def serve(run: RunDir, host: str, port: int, resume: bool) -> int:
    """Serve until a signal or a database failure; returns the exit code."""
    config, secret, clock = load_config(run.config), run.secret(), SystemClock()
    train = find_tasks(config.tasks.train, "tasks.train")
    evaluation = find_tasks(config.tasks.eval, "tasks.eval") if config.tasks.eval is not None else []
    require_locks(run.root)
    connection = open_database(run.database)
    queue = Queue(config, train, evaluation, proxy_secret(secret), run.run_id)
    restore(queue, connection, clock.now())
    if resume:
        queue.reopen()
    service = Service(queue, Store(connection), clock)
    await service.start()
    _collect_rarely()
    listener = _listen(host, port)
    server = _Server(
        uvicorn.Config(
            Api(service, secret),
            http="httptools",
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_GRACE_S,
        )
    )
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    name = f"[{host}]" if ":" in host else host
    url = f"http://{name}:{listener.getsockname()[1]}"
    run.announce("coordinator", url)
    log.info("serving %s at %s, step %d", run.run_id, url, queue.ledger.position.step)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    waits = {asyncio.create_task(stop.wait()), asyncio.create_task(service.failed.wait()), serving}
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await service.close()
    await serving
    return EnvironmentFault.exit_code if service.failed.is_set() else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpcrl.run.coordinator", description="The coordinator of one run.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on and to announce; routable for all nodes"
    )
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--resume", action="store_true", help="open a finished run again")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run = RunDir(given.run_dir)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(run, given.host, given.port, given.resume))
    except HpcrlError as error:
        log.error("%s", error)
        record_failure(run, "coordinator", str(error), error.exit_code)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
