"""Latency and bandwidth of every pair of ranks of an MPI world, joined as a run joins it. For ``hpcrl doctor``.

    python -m mpi4py -m hpcrl.bench.pairs FILE        rank K writes FILE.K: {"ranks", "pairs": [{"a", "b", "latency_us", "mb_s"}]}

A rank that does not find the others writes FILE: {"fault"}. One pair at a time; the best of several rounds, as a busy node says
nothing of its links.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

from mpi4py import MPI

from hpcrl.errors import EnvironmentFault
from hpcrl.protocol.rundir import publish_text
from hpcrl.weights.mpi import Pacer, World

__all__ = ["main"]

_PINGS = 50
_ROUNDS = 5
_BYTES = 4 << 20
_MOST = 8
"""Ranks that are measured with one another; of more, the first ones."""


def _ping(comm: MPI.Intracomm, other: int, buffer: bytearray, first: bool) -> float:
    """Seconds there and back."""
    began = time.perf_counter()
    for sends in (first, not first):
        if sends:
            comm.Send([buffer, MPI.BYTE], other)
        else:
            comm.Recv([buffer, MPI.BYTE], other)
    return time.perf_counter() - began


def _pair(comm: MPI.Intracomm, other: int, first: bool) -> tuple[float, float]:
    """Best latency in µs and bandwidth in MB/s with ``other``."""
    small, large = bytearray(1), bytearray(_BYTES)
    latency = min(_ping(comm, other, small, first) for _ in range(_PINGS)) / 2
    whole = min(_ping(comm, other, large, first) for _ in range(_ROUNDS)) / 2
    return latency * 1e6, _BYTES / whole / 1e6


def _meet(comm: MPI.Intracomm) -> None:
    """Sleeping: MPI's own barrier would take a core from the pair that is measured."""
    request, pacer = comm.Ibarrier(), Pacer(longest_s=0.001)
    while not request.Test():
        pacer.pause()


def main() -> None:
    out, rank, expected = Path(sys.argv[1]), int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    try:
        world = World.connect("inference" if rank else "trainer", expected, socket.gethostname().split(".")[0])
    except EnvironmentFault as error:
        publish_text(
            out, json.dumps({"fault": str(error)})
        )  # each rank: srun kills the others when the first one exits
        raise SystemExit(error.exit_code) from error
    comm = MPI.COMM_WORLD.Dup()
    count, found = min(world.size, _MOST), []
    for a in range(count):
        for b in range(a + 1, count):
            _meet(comm)
            if world.rank in (a, b):
                latency_us, mb_s = _pair(comm, b if world.rank == a else a, world.rank == a)
                if world.rank == a:
                    found.append({"a": world.names[a], "b": world.names[b], "latency_us": latency_us, "mb_s": mb_s})
    _meet(comm)
    comm.Free()
    publish_text(out.with_name(f"{out.name}.{rank}"), json.dumps({"ranks": world.size, "pairs": found}))
    world.close()


if __name__ == "__main__":
    main()
