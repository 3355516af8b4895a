"""The trainer's ranks as one value. With one rank nothing is initialised and every call is a no-op.

Tensors go through the configured backend (nccl or gloo). Decisions (small objects) go through a gloo group of their own, because
ranks wait in it for a batch, possibly for minutes, and nccl would spin a GPU meanwhile.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hpcrl.errors import EnvironmentFault, HpcrlError, RunError
from hpcrl.protocol.address import interface_of

__all__ = ["Ranks"]

T = TypeVar("T")

_BUCKET_ELEMENTS = 1 << 24
"""Gradient elements (float32: 64 MiB) reduced at once."""


class Ranks:
    """``rank`` of ``world`` processes; use :meth:`connect`. ``device`` is where this rank computes."""

    def __init__(self, rank: int, world: int, device: torch.device, control: Any = None) -> None:
        self.rank = rank
        self.world = world
        self.device = device
        self._control = control

    @classmethod
    def connect(
        cls,
        rank: int,
        world: int,
        master_addr: str,
        master_port: int,
        *,
        backend: str = "gloo",
        device: torch.device | None = None,
        timeout_s: float = 86400.0,
        listener: socket.socket | None = None,
    ) -> Ranks:
        """Join the group. Rank 0 listens on ``master_addr:master_port``. Raises EnvironmentFault when they cannot meet.

        ``listener``: rank 0's socket that already listens there, so that nobody else could take the port; it is used up.
        """
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        if world == 1:
            if listener is not None:
                listener.close()
            return cls(0, 1, device)
        _choose_interface(master_addr, master_port)
        try:
            store = dist.TCPStore(
                master_addr,
                master_port,
                world,
                is_master=rank == 0,
                timeout=timedelta(seconds=timeout_s),
                master_listen_fd=None if listener is None else listener.detach(),
            )
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=timeout_s),
            )
            control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        except (RuntimeError, ValueError) as error:
            raise EnvironmentFault(
                f"trainer rank {rank} of {world} cannot join the others at {master_addr}:{master_port}: "
                f"{' '.join(str(error).split())}"
            ) from error
        return cls(rank, world, device, control)

    def close(self) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def decide(self, decision: Callable[[], T]) -> T:
        """Rank 0 computes, all ranks get the result (plain data). An HpcrlError on rank 0 is raised on every rank."""
        if self.world == 1:
            return decision()
        box: list[Any] = [None, None]
        if self.leads:
            try:
                box[0] = decision()
            except HpcrlError as error:
                box[1] = str(error)
                dist.broadcast_object_list(box, src=0, group=self._control)
                raise
        dist.broadcast_object_list(box, src=0, group=self._control)
        if box[1] is not None:
            raise RunError(f"trainer rank 0: {box[1]}")
        result: T = box[0]
        return result

    def together(self, work: Callable[[], T]) -> T:
        """Every rank does its own work; if any raises an HpcrlError, all ranks raise, and each names the first cause."""
        if self.world == 1:
            return work()
        result: T | None = None
        failure: HpcrlError | None = None
        try:
            result = work()
        except HpcrlError as error:
            failure = error
        causes: list[str | None] = [None] * self.world
        dist.all_gather_object(causes, None if failure is None else str(failure), group=self._control)
        if failure is not None:
            raise failure
        for rank, cause in enumerate(causes):
            if cause is not None:
                raise RunError(f"trainer rank {rank}: {cause}")
        return result  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Every rank's value (plain data), by rank, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._control)
        return values

    def sum(self, tensor: torch.Tensor) -> None:
        """Add up a small CPU tensor in place."""
        if self.world > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self._control)

    def maximum(self, tensor: torch.Tensor) -> None:
        if self.world > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control)

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier(group=self._control)

    def sum_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Add up the gradients of all ranks in place, in float32; a parameter without a gradient counts as zeros.

        One reduction per 64 MiB after the last backward pass: exact for ranks of unequal work, and a rank may have none.
        """
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.world == 1:
            return
        for bucket in _buckets(parameters):
            gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
            flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
            dist.all_reduce(flat, op=dist.ReduceOp.SUM)
            for gradient, part in zip(gradients, flat.split([entry.numel() for entry in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))


def _buckets(parameters: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    buckets: list[list[torch.nn.Parameter]] = [[]]
    filled = 0
    for parameter in parameters:
        if buckets[-1] and filled + parameter.numel() > _BUCKET_ELEMENTS:
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += parameter.numel()
    return buckets


def _choose_interface(master_addr: str, master_port: int) -> None:
    """Bind gloo and nccl to the interface that reaches the master; gloo by itself takes loopback where the hostname resolves to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master_addr, master_port or 9))
        except OSError as error:
            raise EnvironmentFault(f"no route to the trainer's first node {master_addr}: {error.strerror}") from error
        interface = interface_of(probe.getsockname()[0])
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
