"""A replica: the vLLM server, its proxy, its version, and what happens when the server dies.

    event loop   uvicorn ─▶ Proxy ─▶ Replica.generate ─▶ VllmServer ─▶ child (loopback)
                 flip()    waits for the lock, closes the gate, flips, opens the gate   ◀── the MPI thread, by run_coroutine_threadsafe
                 _watch()  waits for the child's end; under the lock: on_down, new child, last verified version, gate opens;
                           then on_restart

The gate is what calls wait at: closed while there is no child, no version, or a flip. ``failed`` ends when the child can no longer be
restarted; whoever runs the replica waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from hpcrl.config.schema import RunConfig
from hpcrl.errors import InfraError
from hpcrl.inference.proxy import Proxy, ReplyTokenizer, Stats
from hpcrl.inference.supervisor import Flipped, Generated, VllmServer
from hpcrl.inference.tokenizer import HFTokenizer
from hpcrl.inference.versions import Staged, VersionHolder
from hpcrl.protocol.messages import Sampling

__all__ = ["Replica"]

logger = logging.getLogger(__name__)

_GATE_WAIT_S = 30.0
_RESTARTS = 5


class Replica:
    """One served copy of the policy. Use from one event loop; ``start``, then ``serve``; ``stop`` ends both.

    ``model`` is the directory of the start weights, ``initial_version`` their name ("0.0"), or None when they must not be served
    (a resumed run: nothing is served before the first flip). ``on_down()`` is awaited when the child was found dead, before it is
    replaced, ``on_restart(version)`` after it was; an error of either is the end of ``failed``.
    ``tokenizer`` and ``new_server(version)`` replace the model's tokenizer and the vLLM server (tests).
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
        tokenizer: ReplyTokenizer | None = None,
        new_server: Callable[[str | None], VllmServer] | None = None,
    ) -> None:
        log = log_dir / f"vllm-{replica_id}.log"
        self._versions = VersionHolder(initial_version)
        self._on_down = on_down
        self._on_restart = on_restart
        self._new_server = new_server or (lambda version: VllmServer(config, model, version, log))
        self._server = self._new_server(self._versions.start_version)
        self._proxy = Proxy(config, secret, replica_id, self, tokenizer or HFTokenizer(model))
        self._lock = asyncio.Lock()
        self._gate = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._web: uvicorn.Server | None = None
        self._web_task: asyncio.Task[None] | None = None
        self.restarts = 0
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def served_version(self) -> str | None:
        """The last verified version; None before there is one."""
        return self._versions.current

    @property
    def serving(self) -> bool:
        """Whether calls are answered with :attr:`served_version` now. May be read from any thread."""
        return self._gate.is_set() and self._server.serving

    @property
    def active_requests(self) -> int:
        """Generations under way."""
        return self._proxy.active_requests

    @property
    def stats(self) -> Stats:
        """The proxy's counters."""
        return self._proxy.stats

    async def start(self) -> float:
        """Start the engine; returns the seconds until its first answer. Raises InfraError("engine_start")."""
        took = await self._server.start()
        self._watcher = asyncio.create_task(self._watch())
        self._watcher.add_done_callback(self._watcher_ended)
        self._open_gate()
        return took

    async def serve(self, host: str, port: int = 0) -> str:
        """Serve the proxy on ``host`` (an address that the workers reach); returns the OpenAI base URL."""
        listener = socket.create_server((host, port), backlog=1024)
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

    async def flip(self, version: str, manifest: Path, staging: Path) -> Flipped:
        """Serve ``version`` from now on; what still generates is aborted. ``staging`` must stay until the next flip has succeeded.

        Raises InfraError when the version is refused; the previous one then goes on being served (loaded again if need be).
        """
        async with self._lock:
            self._gate.clear()
            try:
                flipped = await self._server.flip(manifest, staging)
            except InfraError as error:
                if error.reason != "flip_refused":
                    logger.error("flip to %s failed, the engine is reloaded: %s", version, error)
                    await self._reload()
                self._open_gate()
                raise
            self._versions.verified(Staged(version, manifest, staging))
            self._open_gate()
            return flipped

    async def until_serving(self) -> None:
        """Wait for the gate. Raises InfraError("queue_timeout")."""
        if self.serving:
            return
        try:
            async with asyncio.timeout(_GATE_WAIT_S):
                await self._gate.wait()
        except TimeoutError as error:
            raise InfraError("queue_timeout", f"no version was served within {_GATE_WAIT_S:g} s") from error

    async def generate(
        self, token_ids: list[int], sampling: Sampling, stop_token_ids: list[int], **more: Any
    ) -> Generated:
        """Sample a continuation. Raises InfraError, DataError."""
        return await self._server.generate(token_ids, sampling, stop_token_ids, **more)

    async def stop(self) -> None:
        """End proxy and engine; nothing of either is left."""
        self._gate.clear()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})
        await self._server.stop()
        if self._web is not None and self._web_task is not None:
            self._web.should_exit = self._web.force_exit = True
            await self._web_task

    def _open_gate(self) -> None:
        if self._server.serving:
            self._gate.set()

    async def _watch(self) -> None:
        while True:
            server = self._server
            how = await server.wait_dead()
            async with self._lock:
                if self.failed.done():
                    return
                if server is not self._server:
                    continue  # replaced meanwhile by a failed flip
                self._gate.clear()
                logger.error("the engine died: %s", how)
                if self._on_down is not None:
                    await self._on_down()
                with contextlib.suppress(InfraError):  # kept in ``failed``
                    await self._restart(how)
            if self.failed.done():
                return
            if self._on_restart is not None:
                await self._on_restart(self.served_version)

    def _watcher_ended(self, watcher: asyncio.Task[None]) -> None:
        """Nobody would replace the next dead child, or the coordinator believes a wrong report: the replica has failed."""
        error = None if watcher.cancelled() else watcher.exception()
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)

    async def _reload(self) -> None:
        """After a flip left the weights undefined: load the last verified version, or start anew from the start weights."""
        fallback = self._versions.fallback
        if fallback is not None:
            with contextlib.suppress(InfraError):
                await self._server.flip(fallback.manifest, fallback.staging)
                return
        await self._restart("a flip failed")

    async def _restart(self, why: str) -> None:
        """Replace the child (the lock is held).

        Raises InfraError, which is also the end of ``failed``, when it does not come up or the budget is spent.
        """
        try:
            await self._server.stop()
            self.restarts += 1
            if self.restarts > _RESTARTS:
                raise InfraError("engine_dead", f"the engine was restarted {_RESTARTS} times; the last cause: {why}")
            self._server = self._new_server(self._versions.start_version)
            await self._server.start()
            fallback = self._versions.fallback
            if fallback is not None:
                await self._server.flip(fallback.manifest, fallback.staging)
        except InfraError as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise
        self._open_gate()


class _QuietServer(uvicorn.Server):
    """uvicorn without its own signal handlers: the process's role decides what signals mean."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
