"""Which GPUs of its node a replica uses, as a pure function. vLLM by itself takes the first ones, whoever else does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcrl.errors import EnvironmentFault

__all__ = ["given_by_slurm", "own_gpus", "visible_gpus"]


def visible_gpus(environ: Mapping[str, str], count: int) -> list[str]:
    """What this process may use, in the words of CUDA_VISIBLE_DEVICES; ``count`` GPUs answered (names past a bad one do not)."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(number) for number in range(count)]
    return [name.strip() for name in named.split(",")][:count]


def given_by_slurm(environ: Mapping[str, str]) -> int | None:
    """GPUs that Slurm gave the job step on this node; None without Slurm."""
    given = environ.get("SLURM_GPUS_ON_NODE", "")
    return int(given) if given.isdigit() else None


def own_gpus(
    visible: Sequence[str], index: int, per_replica: int, *, given: int | None = None, taken: int = 0
) -> list[str]:
    """The GPUs of replica ``index`` (from 0) of its node, ``per_replica`` (``inference.tensor_parallel``) of them.

    ``given``: as :func:`given_by_slurm`. A process that sees fewer was bound to its own (``--gpus-per-task``, ``--gpu-bind``) and
    uses those. ``taken``: GPUs at the beginning that others use. Raises EnvironmentFault when there are not enough.

    >>> own_gpus(["0", "1", "2", "3"], 1, 2)
    ['2', '3']
    >>> own_gpus(["5"], 1, 1, given=2)
    ['5']
    """
    start = 0 if given is not None and len(visible) < given else taken + index * per_replica
    own = list(visible[start : start + per_replica])
    if len(own) < per_replica:
        raise EnvironmentFault(
            f"replica {index + 1} of this node needs {per_replica} GPU(s) (inference.tensor_parallel) after the {start} of others, "
            f"but only {len(visible)} can be seen ({','.join(visible)}): ask for more GPUs per node (--gpus-per-node), "
            "or start fewer replicas per node (--ntasks-per-node of the inference component)"
        )
    return own
