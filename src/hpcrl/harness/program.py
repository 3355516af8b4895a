"""The ``command`` harness: any program that speaks OpenAI's API, run on the worker, with a door to its attempt's sandbox.

    worker ──spawn──► program ──HTTP──► proxy (OPENAI_BASE_URL, OPENAI_API_KEY)
                         └── $HPCRL_EXEC 'ls', or POST /run on the Unix socket $HPCRL_SANDBOX ──► one command in the sandbox
    ends: exit code 0 → done · another → ``Outcome.problem`` · the sandbox broke, or time is over → the program's session is killed

The program runs outside of the sandbox, because nothing inside has a network: it is the user's own, trusted like the configuration that
names it. What the model writes reaches the machine only if the program executes it elsewhere than through the door.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from aiohttp import web

from hpcrl.errors import InfraError, PolicyError
from hpcrl.harness import sandbox_exec
from hpcrl.harness.loop import Limits, Outcome, Shell

__all__ = ["program_environment", "run_program"]

_SAID = 4000
_STRIPPED = ("PMI_", "PMIX_", "OMPI_", "HYDRA_", "SLURM_", "HPCRL_", "OPENAI_")


def program_environment(
    environ: Mapping[str, str], folder: Path, base_url: str, api_key: str, max_turns: int
) -> dict[str, str]:
    """What the program is told: the worker's environment without MPI's and Slurm's variables, and where everything is."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_STRIPPED)}
    return kept | {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "NO_PROXY": "*",  # a site's proxy must not see the traffic within the job
        "no_proxy": "*",
        "HPCRL_MODEL": "policy",
        "HPCRL_MAX_TURNS": str(max_turns),
        "HPCRL_INSTRUCTION": str(folder / "instruction.md"),
        "HPCRL_SANDBOX": str(folder / "sandbox.sock"),
        "HPCRL_EXEC": str(folder / "exec"),
        "TMPDIR": str(folder),
    }


class _Door:
    """The sandbox behind a Unix socket; commands one after the other. ``broken`` is set when there can be no further one."""

    def __init__(self, shell: Shell, outcome: Outcome, limits: Limits, now: Callable[[], float]) -> None:
        self._shell = shell
        self._outcome = outcome
        self._limits = limits
        self._now = now
        self._lock = asyncio.Lock()
        self.broken: asyncio.Future[InfraError | PolicyError] = asyncio.get_running_loop().create_future()

    async def run(self, request: web.Request) -> web.Response:
        command = (await request.read()).decode("utf-8", "replace")
        async with self._lock:
            timeout_s = min(self._limits.command_timeout_s, self._limits.deadline - self._now())
            started = self._now()
            try:
                if timeout_s <= 0:
                    raise PolicyError("attempt_timeout", "no time is left")
                result = await self._shell.run(command, timeout_s)
            except (InfraError, PolicyError) as error:
                if not self.broken.done():
                    self.broken.set_result(error)
                return web.Response(status=410, text=str(error))
            finally:
                self._outcome.command_s += self._now() - started
        self._outcome.commands += 1
        self._outcome.commands_timed_out += result.timed_out
        headers = {"X-Exit-Code": str(result.exit_code), "X-Timed-Out": str(int(result.timed_out))}
        return web.Response(text=result.output, headers=headers)


async def run_program(
    argv: Sequence[str],
    instruction: str,
    shell: Shell,
    limits: Limits,
    *,
    base_url: str,
    api_key: str,
    now: Callable[[], float] = time.time,
) -> Outcome:
    """Run the program to its end. Raises InfraError (harness_start, attempt_timeout, whatever the sandbox raised).

    May be cancelled: the program and all that it started in its session is killed.
    """
    outcome = Outcome(ended="program")
    door = _Door(shell, outcome, limits, now)
    with tempfile.TemporaryDirectory(prefix="hpcrl-program-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "instruction.md").write_text(instruction, encoding="utf-8")
        shim = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I {shlex.quote(sandbox_exec.__file__)} "$@"\n'
        (folder / "exec").write_text(shim, encoding="utf-8")
        (folder / "exec").chmod(0o700)
        app = web.Application(client_max_size=1 << 20)
        app.router.add_post("/run", door.run)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.UnixSite(runner, str(folder / "sandbox.sock")).start()
            environment = program_environment(os.environ, folder, base_url, api_key, limits.max_turns)
            await _until_over(argv, environment, folder, door, outcome, limits.deadline - now())
        finally:
            await runner.cleanup()
    return outcome


async def _until_over(
    argv: Sequence[str], environment: Mapping[str, str], folder: Path, door: _Door, outcome: Outcome, left_s: float
) -> None:
    log = folder / "output"
    with log.open("wb") as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                env=dict(environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as error:
            raise InfraError("harness_start", f"harness.command {argv[0]}: {error.strerror}") from error
    ended = asyncio.ensure_future(process.wait())
    began = time.monotonic()
    try:
        await asyncio.wait((ended, door.broken), timeout=max(left_s, 0.0), return_when=asyncio.FIRST_COMPLETED)
        _judge(process.returncode, door, outcome, _last(log), time.monotonic() - began)
    finally:
        with contextlib.suppress(ProcessLookupError):  # also what the program left behind in its session
            os.killpg(process.pid, signal.SIGKILL)
        await ended


def _judge(status: int | None, door: _Door, outcome: Outcome, said: str, took_s: float) -> None:
    """How the program ended, and who is to blame: for a lack of time the agent, if most of it went into its commands."""
    if door.broken.done():
        error = door.broken.result()
        if isinstance(error, InfraError):
            raise error
        outcome.ended, outcome.policy_failure = "policy_failure", error.reason
    elif status is None:
        if 2 * outcome.command_s < took_s:
            raise InfraError("attempt_timeout", f"the program did not end in time; it last said: {said}")
        outcome.ended, outcome.policy_failure = "policy_failure", "attempt_timeout"
    elif status:
        outcome.problem = f"{status}: {said}"


def _last(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(file.tell() - _SAID, 0))
        return file.read().decode("utf-8", "replace").strip()
