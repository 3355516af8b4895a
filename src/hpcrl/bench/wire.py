"""The plain baselines on the benchmark's ranks: MPI_Send/MPI_Recv and gloo's broadcast, and the point where all ranks meet."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from mpi4py import MPI

from hpcrl.protocol.address import interface_of, routable_address
from hpcrl.weights.mpi import Pacer, World

__all__ = ["Wire"]

_PART = 1 << 30
"""Largest single message; some MPI libraries fail beyond 2 GiB."""


class Wire:
    """Created by every rank together, after the world. ``meeting`` is a path on the shared file system that does not exist yet."""

    def __init__(self, world: World, meeting: Path) -> None:
        self._world = world
        self._comm = MPI.COMM_WORLD
        # By itself gloo takes the loopback where the hostname resolves to it.
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(routable_address()) or "lo"
        address = f"file://{meeting}"
        dist.init_process_group(
            "gloo", init_method=address, rank=world.rank, world_size=world.size, timeout=timedelta(hours=1)
        )
        self._group = dist.new_group([world.trainers[0], *world.receivers], backend="gloo")

    def meet(self) -> None:
        """Wait for all ranks, sleeping: MPICH's own barrier would take a core per waiting rank from those that work."""
        request, pacer = self._comm.Ibarrier(), Pacer(longest_s=0.001)
        while not request.Test():
            pacer.pause()

    def raw(self, data: memoryview) -> None:
        """Trainer 0 sends ``data``, receiver 0 receives into it, in messages as large as MPI takes; others do nothing."""
        sender, receiver = self._world.trainers[0], self._world.receivers[0]
        for start in range(0, len(data), _PART):
            part = [data[start : start + _PART], MPI.BYTE]
            if self._world.rank == sender:
                self._comm.Send(part, receiver)
            elif self._world.rank == receiver:
                self._comm.Recv(part, sender)

    def broadcast(self, data: memoryview) -> None:
        """gloo's broadcast of ``data`` from trainer 0 to all receivers; other trainers do nothing."""
        if self._world.rank == self._world.trainers[0] or self._world.rank in self._world.receivers:
            dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), src=self._world.trainers[0], group=self._group)

    def close(self) -> None:
        """Leave the gloo group."""
        dist.destroy_process_group()
