"""One vLLM process tree: started under the guard, watched, reaped whole. Knows nothing of weights or requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from hpcrl.inference.guard import kill_session

__all__ = ["Child", "last_lines", "socket_folder"]

_TERM_GRACE_S = 10.0
_LONGEST_TMPDIR = 80


class Child:
    """A command under ``hpcrl.inference.guard``: leader of its own session, output in a log file, gone when we are gone."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self.log = log

    @classmethod
    async def start(cls, command: list[str], environment: Mapping[str, str], log: Path) -> Child:
        """Start ``command``; its output is appended to ``log``."""
        log.parent.mkdir(parents=True, exist_ok=True)
        guarded = [sys.executable, "-m", "hpcrl.inference.guard", *command]
        with open(log, "ab") as output:
            process = await asyncio.create_subprocess_exec(
                *guarded,
                stdin=asyncio.subprocess.PIPE,  # the guard's sign that we live
                stdout=output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
            )
        return cls(process, log)

    @property
    def pid(self) -> int:
        """The guard's process id, which is also the session's."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for the end of the command."""
        return await self._process.wait()

    async def stop(self) -> None:
        """End the command politely, then by force; afterwards no process of its session is left."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)  # the guard passes it on
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _TERM_GRACE_S)
        await asyncio.to_thread(kill_session, self.pid)
        await self._process.wait()


def socket_folder() -> TemporaryDirectory[str]:
    """A new directory of our user's alone for a Unix socket, whose path may have only 107 bytes: not below a long TMPDIR."""
    short = len(gettempdir()) <= _LONGEST_TMPDIR
    return TemporaryDirectory(prefix="hpcrl-vllm-", dir=None if short else "/tmp", ignore_cleanup_errors=True)


def last_lines(log: Path, count: int = 15) -> str:
    """The end of a log file, for an error message; empty when there is none."""
    try:
        with open(log, encoding="utf-8", errors="replace") as file:
            return "".join(deque(file, maxlen=count)).strip()
    except OSError:
        return ""
