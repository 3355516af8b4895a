"""Joining the one MPI world of trainer and inference ranks, in bounded time: an MPI_Init that cannot work may also never return."""

from __future__ import annotations

import socket

from hpcrl.config import RunConfig
from hpcrl.protocol.rundir import RunDir
from hpcrl.run.role import bounded
from hpcrl.weights.mpi import Role, World

__all__ = ["join_world"]

_JOIN_S = 300.0


def join_world(role: Role, run: RunDir, config: RunConfig) -> World:
    """Wait for all ranks of the run. Raises EnvironmentFault for a wrong world; ends the process when there is none in five minutes."""
    expected = config.trainer.ranks + config.inference.replicas
    reason = (
        f"the {expected} ranks did not form an MPI world within {_JOIN_S:.0f} s: the MPI library and srun --mpi={config.slurm.mpi} "
        "do not match (compare `srun --mpi=list`; slurm.mpi), or the nodes do not reach each other"
    )
    with bounded(run, role, _JOIN_S, reason):
        return World.connect(role, expected, socket.gethostname())
