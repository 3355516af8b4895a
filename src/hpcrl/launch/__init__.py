"""From a configuration to running roles: under Slurm (one heterogeneous job) or on this machine alone.

For Python: ``HetExecutor``, ``LocalHetExecutor``, ``Component``, ``HetJob`` (any callables as one heterogeneous job),
``submit_run`` and ``Run`` (a run of hpcrl), ``Outcome``. They are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["Component", "HetExecutor", "HetJob", "LocalHetExecutor", "Outcome", "Run", "submit_run"]

_HOMES = {
    **dict.fromkeys(("Component", "HetExecutor", "HetJob", "LocalHetExecutor"), "hpcrl.launch.het_executor"),
    **dict.fromkeys(("Run", "submit_run"), "hpcrl.launch.runs"),
    "Outcome": "hpcrl.launch.outcome",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
