"""The served side of ``hpcrl bench proxy``: ``python -m hpcrl.bench.proxy_server DIR`` serves DIR/config.yaml until it is stopped.

Without ``--stub`` a whole replica: vLLM and the proxy. With it the proxy alone, over an engine that answers at once: what is left is
the proxy's own time and memory. Prints one JSON line: the URL of the proxy and the socket of vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from hpcrl.bench.stub_engine import StubEngine
from hpcrl.config import RunConfig, load_config
from hpcrl.inference.proxy import Proxy
from hpcrl.inference.replica import Replica
from hpcrl.inference.tokenizer import HFTokenizer

__all__ = ["KEPT_S", "REPLICA", "SECRET", "VERSION"]

SECRET, REPLICA, VERSION = "bench", "r0", "0.0"
KEPT_S = 5.0
"""The stub's proxy keeps taken records for less time than the measurement takes, as a run of hours does with the usual 300 s."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve_stub(config: RunConfig, stopped: asyncio.Event) -> None:
    engine = StubEngine(itertools.repeat([*b"cat sol.py"]), VERSION)
    proxy = Proxy(config, SECRET, REPLICA, engine, HFTokenizer(Path(config.model.path)), kept_s=KEPT_S)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = _Server(uvicorn.Config(proxy.app, log_level="warning", access_log=False, lifespan="off", http="httptools"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    print(json.dumps({"proxy": f"http://127.0.0.1:{listener.getsockname()[1]}/v1", "engine": None}), flush=True)
    await stopped.wait()
    server.should_exit = server.force_exit = True
    await serving


async def _serve_replica(config: RunConfig, folder: Path, stopped: asyncio.Event) -> None:
    model = Path(config.model.path)
    replica = Replica(config, secret=SECRET, replica_id=REPLICA, model=model, initial_version=VERSION, log_dir=folder)
    try:
        await replica.start()
        url = await replica.serve("127.0.0.1")
        print(json.dumps({"proxy": url, "engine": str(replica.engine_socket)}), flush=True)
        await stopped.wait()
    finally:
        await replica.stop()


async def _main(folder: Path, stub: bool) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    config = load_config(folder / "config.yaml")
    await (_serve_stub(config, stopped) if stub else _serve_replica(config, folder, stopped))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="hpcrl.bench.proxy_server")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stub", action="store_true")
    given = parser.parse_args()
    asyncio.run(_main(given.folder, given.stub))
