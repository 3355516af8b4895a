"""The command server: a shell inside the sandbox that reads its script from a pipe. Pure text; channel.py moves it.

    host                                       inside (bash, or any POSIX sh)
    ── OPENING ───────────────────────────►    stdin is the script, so quoted newlines and long commands need no framing
    ◄── "ready PID" ────────────────────────   stderr is the control line (kept as descriptor 3, never given to commands)
    ── setup: environment, limits, cd ────►    may come much later: a sandbox started ahead waits here for its attempt
    ◄── "0 0" ──────────────────────────────
    ── hpcrl_run 7 'ls -l' ───────────────►    SHELL -c 'ls -l' </dev/null, output to stdout, own process group
    ◄── output on stdout
    ◄── "7 0" ──────────────────────────────   id and exit status, written after the command itself has ended

Completion comes on its own pipe, so a background process that keeps stdout open delays nobody. Nothing an agent can write to
these pipes does more than confuse its own sandbox: the score comes from another one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from hpcrl.errors import UserError
from hpcrl.sandbox.limits import Limits

__all__ = ["ENTRY", "ENTRY_BELOW_INIT", "OPENING", "call", "parse_control", "setup"]

# What the container starts: bash where the image has it, since agents expect it, else sh.
ENTRY = ("/bin/sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash --noprofile --norc; exec sh")

# The same as the child of an init that waits for this one child only, so that whatever else it adopts stays a zombie, as coreutils'
# timeout does. Any other one, a link to a program of many names, might not; the shell then buries what it adopts.
ENTRY_BELOW_INIT = (
    "/bin/sh",
    "-c",
    'x=/usr/bin/timeout; if [ -x $x ] && [ ! -L $x ]; then exec $x --foreground 0 "$@"; fi; "$@"; exit $?',
    "sh",
    *ENTRY,
)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_RUNTIME_NAMES = ("CONTAINER", "BIND", "COMMAND", "ENVIRONMENT", "NAME", "NO_EVAL", "APPNAME")

# Own process group per command, so that `kill 0` inside cannot reach the server: job control in bash, setsid elsewhere
# (dash and busybox refuse job control without a terminal).
_FUNCTION = """\
if [ -n "$BASH_VERSION" ]; then
  set -m
  hpcrl_run() { bash -c "$2" </dev/null 2>&1 3>&- & wait $! ; echo "$1 $?" >&3; }
elif command -v setsid >/dev/null; then
  hpcrl_run() { setsid sh -c "$2" </dev/null 2>&1 3>&- & wait $! ; echo "$1 $?" >&3; }
else
  hpcrl_run() { sh -c "$2" </dev/null 2>&1 3>&- & wait $! ; echo "$1 $?" >&3; }
fi
"""

# The first lines of the script, the same for every attempt.
OPENING = "\n".join(
    [
        "exec 3>&2 2>/dev/null",
        # Apptainer tells the container its own path on the host, among other things.
        "unset " + " ".join(f"{prefix}_{name}" for prefix in ("APPTAINER", "SINGULARITY") for name in _RUNTIME_NAMES),
        "unset PROMPT_COMMAND PS1",
        "umask 022",
        _FUNCTION + "echo ready $$ >&3\n",
    ]
).encode()


def setup(workdir: str, env: Mapping[str, str], limits: Limits) -> bytes:
    """The lines that make the server an attempt's own; "0 STATUS" answers. Raises UserError for a variable's name that is none."""
    for name in env:
        if not _NAME.fullmatch(name):
            raise UserError(f"{name!r} is not a valid environment variable name for a sandbox")
    lines = [
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(env.items())),
        *limits.ulimits(),
        f"cd {shlex.quote(workdir)}; echo 0 $? >&3",
    ]
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape")


def call(number: int, command: str) -> bytes:
    """One command as a line of script. ``command`` must not contain NUL."""
    return f"hpcrl_run {number} {shlex.quote(command)}\n".encode("utf-8", "surrogateescape")


def parse_control(line: bytes) -> tuple[int, int] | None:
    """``b"7 0"`` → (7, 0); None for anything else (a container runtime's own messages arrive on the same pipe)."""
    fields = line.split()
    if len(fields) == 2 and all(field.isdigit() and len(field) < 10 for field in fields):
        return int(fields[0]), int(fields[1])
    return None
