"""A replica: vLLM servers, their proxy, the version they serve, and what happens when a server dies.

    event loop   uvicorn ─▶ Proxy ─▶ Replica.generate ─▶ VllmServer ─▶ child (Unix socket)
                 flip()    waits for the lock, closes the gate, flips, opens the gate   ◀── the MPI thread, by run_coroutine_threadsafe
                 _watch(slot)  waits for the child's end; under the lock: on_down, new child, last verified version, gate opens;
                           then on_restart

The gate is what calls wait at: closed while there is no child, no version, or a flip; with two slots, or adapters, a flip leaves it
open. ``failed``
ends when a child can no longer be restarted; whoever runs the replica waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from hpcrl.config.schema import RunConfig
from hpcrl.errors import InfraError
from hpcrl.inference.adapters import Adapters
from hpcrl.inference.engines import Engines
from hpcrl.inference.proxy import Proxy, ReplyTokenizer, Stats
from hpcrl.inference.servers import NewServer, Servers
from hpcrl.inference.supervisor import Flipped, Generated, VllmServer
from hpcrl.inference.tokenizer import HFTokenizer
from hpcrl.inference.versions import Staged
from hpcrl.protocol.keys import AttemptKey
from hpcrl.protocol.messages import Sampling
from hpcrl.weights.adapter_store import AdapterStore

__all__ = ["Replica"]

logger = logging.getLogger(__name__)


class Replica:
    """One served copy of the policy. Use from one event loop; ``start``, then ``serve``; ``stop`` ends both.

    ``model`` is the directory of the start weights, ``initial_version`` their name ("0.0"), or None when they must not be served
    (a resumed run: nothing is served before the first flip). ``on_down()`` is awaited when the child was found dead, before it is
    replaced, ``on_restart(version)`` after it was; an error of either is the end of ``failed``.
    ``on_broken(version, reason)`` is awaited when a flip left nothing that can be served, before the last verified version is loaded
    again. ``adapters`` is where versions lie when they are adapters (``config.lora``). ``tokenizer`` and ``new_server`` replace the
    model's tokenizer and the vLLM servers (tests).
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        secret: str,
        replica_id: str,
        model: Path,
        initial_version: str | None,
        log_dir: Path,
        on_down: Callable[[], Awaitable[None]] | None = None,
        on_restart: Callable[[str | None], Awaitable[None]] | None = None,
        on_broken: Callable[[str, str], Awaitable[None]] | None = None,
        adapters: AdapterStore | None = None,
        tokenizer: ReplyTokenizer | None = None,
        new_server: NewServer | None = None,
    ) -> None:
        logs = [log_dir / f"vllm-{replica_id}{name}.log" for name in ("", "-b")]
        self._on_down = on_down
        self._on_restart = on_restart
        self._on_broken = on_broken
        new_server = new_server or (lambda slot, version: VllmServer(config, model, version, logs[slot]))
        self._engines: Servers
        if adapters is None:
            self._engines = Engines(config.engines, initial_version, new_server)
        else:
            self._engines = Adapters(config.slots, new_server, adapters)
        self._gate_wait_s = config.inference.request_timeout_s
        self._proxy = Proxy(config, secret, replica_id, self, tokenizer or HFTokenizer(model))
        self._lock = asyncio.Lock()
        self._gate = asyncio.Event()
        self._watchers: list[asyncio.Task[None]] = []
        self._web: uvicorn.Server | None = None
        self._web_task: asyncio.Task[None] | None = None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def served_version(self) -> str | None:
        """The last verified version; None before there is one."""
        return self._engines.current

    @property
    def serving(self) -> bool:
        """Whether calls are answered with :attr:`served_version` now. May be read from any thread."""
        return self._gate.is_set() and self._engines.serving

    @property
    def engine_socket(self) -> Path:
        """Where vLLM itself listens, for measurements beside the proxy. Raises InfraError when it is not running."""
        return self._engines.server(self._engines.active).socket

    @property
    def restarts(self) -> int:
        """Engines that were replaced."""
        return self._engines.restarts

    @property
    def active_requests(self) -> int:
        """Generations under way."""
        return self._proxy.active_requests

    @property
    def attempts_under_way(self) -> list[str]:
        """The attempts that have calls under way."""
        return self._proxy.attempts_under_way

    @property
    def stats(self) -> Stats:
        """The proxy's counters."""
        return self._proxy.stats

    async def start(self) -> float:
        """Start the engine; returns the seconds until its first answer. Raises InfraError("engine_start")."""
        took = await self._engines.start()
        self._watchers = [asyncio.create_task(self._watch(slot)) for slot in range(self._engines.count)]
        for watcher in self._watchers:
            watcher.add_done_callback(self._watcher_ended)
        self._open_gate()
        return took

    async def serve(self, host: str, port: int = 0) -> str:
        """Serve the proxy on ``host`` (an address that the workers reach); returns the OpenAI base URL."""
        listener = socket.create_server((host, port), backlog=1024)
        # Accepted connections inherit it. asyncio sets it only where the socket's protocol is given, which it is not here; without it
        # an answer waits 40 ms for the acknowledgement of its head.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        config = uvicorn.Config(
            self._proxy.app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            http="httptools",
            timeout_keep_alive=60,
        )
        self._web = _QuietServer(config)
        self._web_task = asyncio.create_task(self._web.serve(sockets=[listener]))
        while not self._web.started and not self._web_task.done():
            await asyncio.sleep(0.01)
        if self._web_task.done():
            raise InfraError("proxy_start", f"the proxy could not serve on {host}:{port}")
        return f"http://{host}:{listener.getsockname()[1]}/v1"

    async def flip(self, version: str, manifest: Path, staging: Path, keep: Collection[str] = ()) -> Flipped:
        """Serve ``version`` from now on. ``staging`` must stay until the next flip has succeeded.

        ``keep`` are older versions that attempts are still bound to; adapters of others may be dropped. What still generates is treated
        as ``weights.pin`` says. Raises InfraError when the version is refused; the previous one then goes on being served (loaded again
        if need be).
        """

        async def broken(reason: str) -> None:
            if self._on_broken is not None:
                await self._on_broken(version, reason)

        staged = Staged(version, manifest, staging)
        async with self._lock:
            await self._engines.check(staged)  # before the gate: calls need not wait for it
            if self._engines.flips_pause:
                self._gate.clear()
            try:
                return await self._engines.flip(staged, keep, broken)
            except InfraError:
                if self._engines.lost is not None:
                    self._fail(self._engines.lost)
                raise
            finally:
                self._open_gate()

    async def until_serving(self) -> None:
        """Wait for the gate. Raises InfraError("queue_timeout")."""
        if self.serving:
            return
        try:
            async with asyncio.timeout(self._gate_wait_s):
                await self._gate.wait()
        except TimeoutError as error:
            raise InfraError("queue_timeout", f"no version was served within {self._gate_wait_s:g} s") from error

    def version_for(self, key: AttemptKey) -> str | None:
        """The version that may answer the attempt; None: none that is served here."""
        return self._engines.version_for(key)

    async def generate(
        self, version: str, token_ids: list[int], sampling: Sampling, stop_token_ids: list[int], **more: Any
    ) -> Generated:
        """Sample a continuation with ``version``. Raises InfraError, DataError."""
        return await self._engines.generate(version, token_ids, sampling, stop_token_ids, **more)

    async def kv_use(self) -> float | None:
        """The share of the KV cache in use where new attempts are served; None when it cannot be known now."""
        return await self._engines.server(self._engines.active).kv_use()

    async def cancel(self, attempt_id: str) -> None:
        """End an attempt that is not wanted any more: what it generates is dropped, further calls are refused."""
        await self._proxy.cancel(attempt_id)

    async def stop(self) -> None:
        """End proxy and engine; nothing of either is left."""
        self._gate.clear()
        for watcher in self._watchers:
            watcher.cancel()
        if self._watchers:
            await asyncio.wait(self._watchers)
        await self._engines.stop()
        if self._web is not None and self._web_task is not None:
            self._web.should_exit = self._web.force_exit = True
            await self._web_task

    def _open_gate(self) -> None:
        if self._engines.serving:
            self._gate.set()

    async def _watch(self, slot: int) -> None:
        while True:
            server = self._engines.server(slot)
            how = await server.wait_dead()
            async with self._lock:
                if self.failed.done():
                    return
                if server is not self._engines.server(slot):
                    continue  # replaced meanwhile by a failed flip
                active = slot == self._engines.active
                if active:
                    self._gate.clear()
                logger.error("the engine died: %s", how)
                if self._on_down is not None:
                    await self._on_down()
                if not active:  # only attempts of an older version are lost with it
                    await self._report_restart()
                try:
                    await self._engines.renew(slot, how)
                except InfraError as error:
                    self._fail(error)
                    return
                self._open_gate()
            if active:
                await self._report_restart()

    async def _report_restart(self) -> None:
        if self._on_restart is not None:
            await self._on_restart(self.served_version)

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    def _watcher_ended(self, watcher: asyncio.Task[None]) -> None:
        """Nobody would replace the next dead child, or the coordinator believes a wrong report: the replica has failed."""
        error = None if watcher.cancelled() else watcher.exception()
        if error is not None:
            self._fail(error)


class _QuietServer(uvicorn.Server):
    """uvicorn without its own signal handlers: the process's role decides what signals mean."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
