"""The MPI world of trainer and inference ranks; the only file that imports mpi4py.

Three communicators, so that nothing can match by accident: control (JSON messages, any to any), data (chunks, tag = chunk index) and
the trainers' own. No pickle anywhere.

Threads: MPI is initialised with THREAD_SERIALIZED. ``connect`` and ``close`` belong to the thread that owns the process, everything
between to the one thread that runs the Publisher or the Receiver. Waiting never blocks inside MPI, whose blocking calls spin a core:
it polls, and :class:`Pacer` spaces the polls (at once while data flows, every few milliseconds while nothing happens).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import mpi4py

mpi4py.rc.initialize = False  # by connect(), with the thread level needed; importing this module starts nothing
mpi4py.rc.finalize = False

from mpi4py import MPI  # noqa: E402

from hpcrl.errors import DataError, EnvironmentFault, InfraError  # noqa: E402
from hpcrl.weights import pmi_relay  # noqa: E402

__all__ = ["Pacer", "Role", "World", "wait_until"]

Role = Literal["trainer", "inference"]

log = logging.getLogger(__name__)

_CONTROL_TAG = 1
_NAME_BYTES = 128
_SPINS = 50
_SAY_S = 60.0
"""A wait in which nothing moves is told that often: whoever looks for a hang must not wait for its end."""


class Pacer:
    """How long to pause between polls: not at all at first, then doubling up to ``longest_s``; progress starts it anew."""

    def __init__(self, longest_s: float = 0.005) -> None:
        self._longest_s = longest_s
        self._misses = 0

    def progress(self) -> None:
        """Something happened: poll again at once."""
        self._misses = 0

    def pause(self) -> None:
        """Nothing happened: let others have the core."""
        self._misses += 1
        if self._misses <= _SPINS:
            time.sleep(0)
        else:
            time.sleep(min(self._longest_s, 20e-6 * 2.0 ** min(self._misses - _SPINS, 16)))


def wait_until(
    condition: Callable[[], bool], turn: Callable[[], bool], timeout_s: float, complaint: Callable[[], str]
) -> None:
    """Take turns (False: nothing moved) until ``condition`` holds. Raises InfraError when nothing has moved for ``timeout_s``."""
    pacer, moved, told = Pacer(longest_s=0.001), time.monotonic(), 0
    while not condition():
        if turn():
            pacer.progress()
            moved, told = time.monotonic(), 0
            continue
        still = time.monotonic() - moved
        if still > timeout_s:
            raise InfraError("weights_timeout", f"nothing has moved for {timeout_s:.0f} s: {complaint()}")
        if still > (told + 1) * _SAY_S:
            told += 1
            log.info("nothing has moved for %.0f s: %s", still, complaint())
        pacer.pause()


class World:
    """All ranks of the combined step, who they are, and messages between them. Ranks are those of the whole world.

    ``nodes`` are the receivers by node: ranks with the same name share one, and its ``/dev/shm``.

    >>> world = World.connect("inference", expected=5, name=socket.gethostname())
    >>> world.trainers, world.receivers, world.nodes
    ((0, 1), (2, 3, 4), ((2, 3), (4,)))
    """

    def __init__(self, comm: MPI.Intracomm, roles: Sequence[str], names: Sequence[str], owns_mpi: bool) -> None:
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.names = tuple(names)
        self.trainers = tuple(rank for rank, role in enumerate(roles) if role == "trainer")
        self.receivers = tuple(rank for rank, role in enumerate(roles) if role == "inference")
        self.nodes = _by_name(self.receivers, self.names)
        self._owns_mpi = owns_mpi
        self._control = comm.Dup()
        self._data = comm.Dup()
        is_trainer = self.rank in self.trainers
        self._trainer_comm = comm.Split(0 if is_trainer else MPI.UNDEFINED, self.rank)
        self._tags = int(comm.Get_attr(MPI.TAG_UB) or 32767)
        self._sending: list[tuple[MPI.Request, bytes]] = []

    @classmethod
    def connect(cls, role: Role, expected: int, name: str = "") -> World:
        """Initialise MPI and learn everybody's role; returns once all ranks are here.

        ``expected`` is the number of ranks that the job started (SLURM_NTASKS of the combined step); ``name`` is the node's, for
        messages to people and to know who shares memory. Raises EnvironmentFault when MPI found another number of ranks, or no trainer.
        """
        owns_mpi = not MPI.Is_initialized()
        if owns_mpi:
            pmi_relay.install()
        if owns_mpi and MPI.Init_thread(MPI.THREAD_SERIALIZED) < MPI.THREAD_SERIALIZED:
            raise EnvironmentFault("the MPI library does not offer MPI_THREAD_SERIALIZED, which hpcrl needs")
        comm = MPI.COMM_WORLD
        if comm.Get_size() != expected:
            raise EnvironmentFault(
                f"the MPI world has size {comm.Get_size()} but the job has {expected} ranks: the MPI library and "
                "srun --mpi=… do not match (compare `srun --mpi=list` with the library that mpi4py loads; slurm.mpi)"
            )
        mine = f"{role} {name or f'rank {comm.Get_rank()}'}".encode()[:_NAME_BYTES].ljust(_NAME_BYTES)
        everyone = bytearray(_NAME_BYTES * expected)
        _finish(comm.Iallgather([mine, MPI.BYTE], [everyone, MPI.BYTE]))
        cells = [
            everyone[i : i + _NAME_BYTES].decode(errors="replace").strip() for i in range(0, len(everyone), _NAME_BYTES)
        ]
        roles = [cell.partition(" ")[0] for cell in cells]
        if "trainer" not in roles:
            raise EnvironmentFault(
                "the MPI world has no trainer rank: the job must start het group 0 (trainer) in the same step"
            )
        return cls(comm, roles, [cell.partition(" ")[2] for cell in cells], owns_mpi)

    # ------------------------------------------------------------ control messages

    def send_json(self, dests: Sequence[int], message: dict[str, Any]) -> None:
        """Send one control message to some ranks; returns at once."""
        payload = json.dumps(message, separators=(",", ":")).encode()
        for dest in dests:
            self._sending.append((self._control.Isend([payload, MPI.BYTE], dest, _CONTROL_TAG), payload))

    def poll(self) -> tuple[int, dict[str, Any]] | None:
        """The next control message with its source, or None when there is none now."""
        if self._sending:
            self._sending = [(request, payload) for request, payload in self._sending if not request.Test()]
        status = MPI.Status()
        message = self._control.Improbe(MPI.ANY_SOURCE, _CONTROL_TAG, status)
        if message is None:
            return None
        payload = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([payload, MPI.BYTE])
        content = json.loads(payload)
        if not isinstance(content, dict) or "type" not in content:
            raise DataError("control_message", f"rank {status.Get_source()} sent {payload[:80]!r}")
        return status.Get_source(), content

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until all control messages have left this process; False when that takes longer."""
        deadline, pacer = time.monotonic() + timeout_s, Pacer()
        while self._sending:
            self._sending = [(request, payload) for request, payload in self._sending if not request.Test()]
            if time.monotonic() > deadline:
                return False
            pacer.pause()
        return True

    def allgather_json(self, value: Any) -> list[Any]:
        """Among the trainers: everyone's value, in order of rank. Collective over the trainers."""
        return [self.bcast_json(value, root) for root in range(len(self.trainers))]

    def bcast_json(self, value: Any, root: int = 0) -> Any:
        """Among the trainers: everyone gets the value of trainer number ``root``. Collective over the trainers."""
        comm = self._trainer_comm
        if comm == MPI.COMM_NULL:
            raise EnvironmentFault("only trainer ranks take part in bcast_json")
        payload = json.dumps(value).encode() if comm.Get_rank() == root else b""
        length = bytearray(len(payload).to_bytes(8, "little"))
        _finish(comm.Ibcast([length, MPI.BYTE], root))
        buffer = bytearray(payload or int.from_bytes(length, "little"))
        _finish(comm.Ibcast([buffer, MPI.BYTE], root))
        return json.loads(buffer)

    # ------------------------------------------------------------ chunks

    def isend(self, data: memoryview, dest: int, tag: int) -> MPI.Request:
        """Begin to send bytes. They must not change until the request has completed."""
        return self._data.Isend([data, MPI.BYTE], dest, tag % (self._tags + 1))

    def irecv(self, data: memoryview, source: int, tag: int) -> MPI.Request:
        """Begin to receive exactly ``len(data)`` bytes."""
        return self._data.Irecv([data, MPI.BYTE], source, tag % (self._tags + 1))

    def completed(self, requests: Sequence[MPI.Request]) -> list[int]:
        """Indices of the requests that have completed since the last look."""
        return list(MPI.Request.Testsome(list(requests)) or ())

    # ------------------------------------------------------------ end

    def close(self) -> None:
        """Collective end: every rank of the world must call it, after its last transfer."""
        self.flush()
        for comm in (self._control, self._data, self._trainer_comm):
            if comm != MPI.COMM_NULL:
                comm.Free()
        if self._owns_mpi:
            MPI.Finalize()

    def abort(self, code: int = 1) -> None:
        """End all ranks now: the others would wait for this one for ever."""
        MPI.COMM_WORLD.Abort(code)


def _by_name(ranks: Sequence[int], names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(names[rank], []).append(rank)
    return tuple(tuple(group) for group in groups.values())


def _finish(request: MPI.Request) -> None:
    pacer = Pacer()
    while not request.Test():
        pacer.pause()
