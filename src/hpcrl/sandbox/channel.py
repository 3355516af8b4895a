"""The three lines to a sandbox process: script in, output out, control out. See server.py for what travels.

Script and control are socket pairs: what runs beside the server, as the same user, could open a pipe through /proc/PID/fd, and have
the server run a script of its own, or say that a command has ended. A socket cannot be opened. Output is a pipe, since programs may
open /dev/stdout.

    event loop ──add_reader(stdout)──► OutputBuffer of the running command, or nowhere between commands
               ──add_reader(stderr)──► "ready PID", "ID STATUS"; anything else is kept as diagnostics (bounded)
               ──process exit────────► the waiting call fails with Died

One command at a time. When the status arrives, what already lies in the output pipe is read first: the command has ended, so its
own output is complete.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from hpcrl.sandbox.output import OutputBuffer
from hpcrl.sandbox.server import OPENING, call, parse_control

__all__ = ["Channel", "Died", "Flooded"]

_READ_SIZE = 1 << 18
_DIAGNOSTICS = 8192
_CONTROL_FLOOD = 1 << 20


class Died(Exception):
    """The sandbox process ended; ``returncode`` as in subprocess (negative: killed by that signal)."""

    def __init__(self, returncode: int, diagnostics: str) -> None:
        super().__init__(diagnostics)
        self.returncode = returncode
        self.diagnostics = diagnostics


class Flooded(Exception):
    """The command printed more than it may."""


class Channel:
    """Owns the process and its pipes. All methods belong to one event loop."""

    def __init__(self, output_bytes: int, flood_bytes: int) -> None:
        self._output_bytes = output_bytes
        self._flood_bytes = flood_bytes
        self._output: OutputBuffer | None = None
        self._pipes: list[int] = []
        self._control = bytearray()
        self._control_bytes = 0
        self._diagnostics = bytearray()
        self._number = 0
        self._waiting: asyncio.Future[int] | None = None
        self._ended: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._script: asyncio.StreamWriter | None = None
        self.server_pid = 0

    @property
    def pid(self) -> int:
        """The started process, as the host sees it; 0 before ``spawn``."""
        return self._process.pid if self._process is not None else 0

    @property
    def alive(self) -> bool:
        """Whether the process was started and has not been reaped: its process id is still its own."""
        return self._process is not None and self._process.returncode is None

    @property
    def diagnostics(self) -> str:
        """What the container runtime said: the end of it."""
        return self._diagnostics.decode("utf-8", "replace").strip()

    def limit(self, output_bytes: int, flood_bytes: int) -> None:
        """What of a command's output is kept, and how much it may print at all."""
        self._output_bytes, self._flood_bytes = output_bytes, flood_bytes

    async def spawn(self, argv: list[str], env: Mapping[str, str], cwd: Path) -> None:
        """Start the process and wait for the server's "ready". Raises Died, OSError."""
        loop = asyncio.get_running_loop()
        ready = self._waiting = loop.create_future()
        output_read, output_write = os.pipe()
        inner, outer = socket.socketpair()
        control, control_write = socket.socketpair()
        self._pipes = [output_read, control.detach()]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=inner.fileno(),
                stdout=output_write,
                stderr=control_write.fileno(),
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
            )
        finally:
            os.close(output_write)
            control_write.close()
            inner.close()
        _, self._script = await asyncio.open_connection(sock=outer)
        for pipe, callback in zip(self._pipes, (self._on_output, self._on_control), strict=True):
            os.set_blocking(pipe, False)
            loop.add_reader(pipe, callback)
        self._ended = asyncio.create_task(self._watch())
        self._send(OPENING)
        self.server_pid = await ready
        self._waiting = None

    async def configure(self, script: bytes) -> int:
        """Send ``script`` (see server.setup) before the first command; its status. Raises Died."""
        waiting = self._waiting = asyncio.get_running_loop().create_future()
        if not self.alive:
            raise self._died()
        self._send(script)
        status = await waiting
        self._waiting = None
        return status

    async def _watch(self) -> None:
        if self._process is None:
            return
        returncode = await self._process.wait()
        self._on_control()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(Died(returncode, self.diagnostics))

    def _send(self, data: bytes) -> None:
        if self._script is not None:
            self._script.write(data)

    def _died(self) -> Died:
        code = self._process.returncode if self._process is not None else None
        return Died(code if code is not None else 0, self.diagnostics)

    def begin(self, command: str) -> tuple[asyncio.Future[int], OutputBuffer]:
        """Send a command; the future gets its exit status, or Died, or Flooded."""
        self._number += 1
        self._control_bytes = 0
        waiting: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        buffer = OutputBuffer(self._output_bytes)
        self._waiting, self._output = waiting, buffer
        if not self.alive:
            waiting.set_exception(self._died())
        else:
            self._send(call(self._number, command))
        return waiting, buffer

    def rearm(self) -> asyncio.Future[int]:
        """A new future for the command in progress, after Flooded. Further output is dropped."""
        self._output = None
        self._waiting = asyncio.get_running_loop().create_future()
        return self._waiting

    def finish(self) -> None:
        """The command in progress is over: later output belongs to the next one."""
        self._waiting = None

    def _on_output(self, limit: int = _READ_SIZE) -> None:
        try:
            data = os.read(self._pipes[0], limit)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._pipes[0])
            return
        if self._output is None:
            return
        self._output.add(data)
        if self._output.total > self._flood_bytes and self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(Flooded())

    def _on_control(self) -> None:
        if not self._pipes:
            return
        try:
            data = os.read(self._pipes[1], 4096)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._pipes[1])
            return
        self._control_bytes += len(data)
        if self._control_bytes > _CONTROL_FLOOD and self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(Died(1, "the command server's control line was flooded"))
        self._control += data
        *lines, rest = bytes(self._control).split(b"\n")
        self._control[:] = rest[-_DIAGNOSTICS:]
        for line in lines:
            self._on_line(line)

    def _on_line(self, line: bytes) -> None:
        waiting = self._waiting
        if self.server_pid == 0 and line.startswith(b"ready ") and line[6:].isdigit():
            if waiting is not None and not waiting.done():
                waiting.set_result(int(line[6:]))
            return
        parsed = parse_control(line)
        if parsed is None:
            self._diagnostics += line + b"\n"
            del self._diagnostics[:-_DIAGNOSTICS]
        elif self.server_pid != 0 and parsed[0] == self._number and waiting is not None and not waiting.done():
            self._on_output()
            if not waiting.done():
                waiting.set_result(parsed[1])

    async def close(self) -> None:
        """Wait for the process, which the caller has killed, and free the pipes."""
        for pipe in self._pipes:
            asyncio.get_running_loop().remove_reader(pipe)
        if self._process is not None:
            await self._process.wait()
        if self._script is not None:
            self._script.close()
        if self._ended is not None:
            await self._ended
        if self._waiting is not None and self._waiting.done() and not self._waiting.cancelled():
            self._waiting.exception()
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes = []
