"""Types of single configuration values. What they refuse would otherwise fail late: on a node, in a child, in the middle of a run.

A refusal says what is wrong; the key's name and the value are added by ``config.load``.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

__all__ = [
    "Beta",
    "Count",
    "Environment",
    "Line",
    "MpiPlugin",
    "Positive",
    "Seconds",
    "Seed",
    "SrunArguments",
    "Text",
    "VllmArguments",
    "WholeDistribution",
]

_LARGEST = 10**9
"""Keeps products (MiB to bytes, seconds to deadlines) inside what the kernel, SQLite and the event loop can take."""

Positive = Annotated[int, Field(gt=0, le=_LARGEST)]
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
Seconds = Annotated[float, Field(gt=0, le=_LARGEST)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""vLLM seeds NumPy, which takes 32 bits."""


def _text(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty; leave the key out for its default")
    return value


def _line(value: str) -> str:
    if any(ord(character) < 32 or character == "\x7f" for character in value):
        raise ValueError("must be one line without control characters")
    return _text(value)


Text = Annotated[str, AfterValidator(_text)]
Line = Annotated[str, AfterValidator(_line)]
"""Paths, names and arguments: a line break or NUL in them is a YAML accident, and the latter ends no path."""


def _srun_arguments(arguments: list[str]) -> list[str]:
    if arguments and not arguments[0].startswith("-"):
        raise ValueError(
            f"srun would take {arguments[0]!r} for the command to run; write options, as in [--exclusive, -w, node1]"
        )
    if ":" in arguments:
        raise ValueError("':' would begin another part of the heterogeneous step; these options go to every part")
    return arguments


SrunArguments = Annotated[list[Line], AfterValidator(_srun_arguments)]

_OWN = {
    "--model": "model.path",
    "--dtype": "model.dtype",
    "--seed": "run.seed",
    "--max-model-len": "rollout.context_tokens",
    "--max-num-seqs": "inference.max_num_seqs",
    "--tensor-parallel-size": "inference.tensor_parallel",
    "-tp": "inference.tensor_parallel",
    "--enforce-eager": "inference.enforce_eager",
    "--gpu-memory-utilization": "inference.gpu_memory_utilization",
    "--kv-cache-memory-bytes": "inference.kv_cache_gib",
}
_SAMPLING = "sampling must be what the trainer computes, and recorded logprobs those of that distribution"
_FIXED = {
    **dict.fromkeys(("--host", "--port", "--uds", "--api-key", "--served-model-name"), "only the proxy talks to vLLM"),
    "--weight-transfer-config": "versions come in hpcrl's own way",
    **dict.fromkeys(
        ("--generation-config", "--override-generation-config", "--logits-processors", "--logprobs-mode"), _SAMPLING
    ),
}
"""What cannot be given → why."""


def _vllm_arguments(arguments: list[str]) -> list[str]:
    for argument in arguments:
        name = argument.split("=")[0].replace("_", "-")
        if name in _OWN:
            raise ValueError(f"{argument} is set by {_OWN[name]}; set that key")
        if name in _FIXED:
            raise ValueError(f"{name} is hpcrl's own and cannot be changed ({_FIXED[name]}); leave it out")
    return arguments


VllmArguments = Annotated[list[Line], AfterValidator(_vllm_arguments)]


def _mpi_plugin(name: str) -> str:
    if not re.fullmatch(r"\w+", name, re.ASCII):
        raise ValueError(
            "must be the name of an MPI plugin of Slurm, such as pmi2 or pmix; `srun --mpi=list` prints them"
        )
    return name


MpiPlugin = Annotated[str, AfterValidator(_mpi_plugin)]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _environment(variables: dict[str, str]) -> dict[str, str]:
    for name, value in variables.items():
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} is no name of an environment variable (letters, digits and _, no digit first)")
        if "\0" in value:
            raise ValueError(f"the value of {name} holds a NUL character")
    return variables


Environment = Annotated[dict[str, str], AfterValidator(_environment)]


def _whole_distribution(top_p: float) -> float:
    if top_p != 1.0:
        raise ValueError(
            "must be 1: the trainer computes the whole distribution, and logprobs recorded within a nucleus are of another one"
        )
    return top_p


WholeDistribution = Annotated[float, AfterValidator(_whole_distribution)]
