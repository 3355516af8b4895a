"""Stands between an MPI rank and Slurm's pmi2 plugin and keeps the rank's commands short.

Slurm reads PMI-1 commands in pieces of 1024 bytes and takes the first piece for the whole command (seen with 22.05.8: "value not
properly terminated in client request"). It allows values of 1024 bytes, so a command with a long value is longer than a piece, and
whether MPICH writes one depends on what happens to lie in uninitialised memory: MPI_Init hangs once in a while. The relay lowers the
longest value that Slurm announces (``vallen_max``); MPICH then cuts its addresses into more, shorter commands.

    rank ── PMI_FD (socket pair) ──► relay ── the descriptor Slurm gave ──► slurmstepd

A process of its own, because MPI_Init does not let other Python threads run. It imports nothing of hpcrl and ends with either side.
"""

from __future__ import annotations

import os
import re
import select
import socket
import subprocess
import sys

__all__ = ["install", "relay", "shorten"]

LONGEST_VALUE = 900
"""Leaves room for ``cmd=put kvsname=… key=… value=`` within 1024 bytes."""
_PIECE = 65536


def shorten(line: bytes) -> bytes:
    """Lower ``vallen_max`` in Slurm's answer to get_maxes; any other line stays as it is."""
    if not line.startswith(b"cmd=maxes"):
        return line
    return re.sub(rb"vallen_max=(\d+)", lambda found: b"vallen_max=%d" % min(LONGEST_VALUE, int(found[1])), line)


def install() -> None:
    """Put a relay before this process's PMI descriptor. Does nothing outside a Slurm step that speaks PMI over a descriptor."""
    given = os.environ.get("PMI_FD")
    if given is None or "SLURM_STEP_ID" not in os.environ:
        return
    slurm = int(given)
    mine, its = socket.socketpair()
    command = [sys.executable, "-I", "-S", __file__, str(its.fileno()), str(slurm)]
    subprocess.Popen(command, pass_fds=(its.fileno(), slurm), stdin=subprocess.DEVNULL, start_new_session=True)
    its.close()
    os.close(slurm)
    os.environ["PMI_FD"] = str(mine.detach())


def relay(rank: int, slurm: int) -> None:
    """Copy between two descriptors until one of them ends."""
    pending = b""
    while True:
        for ready in select.select([rank, slurm], [], [])[0]:
            try:
                data = os.read(ready, _PIECE)
            except ConnectionResetError:
                return
            if not data:
                return
            if ready == rank:
                _write(slurm, data)
                continue
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                _write(rank, shorten(line) + b"\n")


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    try:
        relay(int(sys.argv[1]), int(sys.argv[2]))
    except BrokenPipeError:
        sys.exit(0)
