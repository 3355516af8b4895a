"""Checkpoints of the trainer: ``checkpoints/L.S/`` (torch.distributed.checkpoint), complete once it holds ``COMPLETE``.

    all ranks   write into .L.S.partial/        rank 0   state.json, fsync, rename to L.S/, marker last, remove old ones

A process killed at any time leaves either a ``.partial`` directory or one without marker; both are ignored and removed by the
next save. A checkpoint holds the model, the optimizer, each rank's random state, step and lineage; of a model with adapters only
these and the digest of the frozen weights, which are in ``model.path``. Adding or removing ranks between save and resume is allowed.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from hpcrl.errors import DataError, RunError, UserError
from hpcrl.protocol.rundir import publish_text
from hpcrl.protocol.version import PolicyVersion
from hpcrl.trainer.distributed import Ranks
from hpcrl.trainer.model import Policy

__all__ = ["Checkpoint", "Checkpoints", "latest_complete"]

_MARKER = "COMPLETE"
_STATE = "state.json"
_PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint: where it is and what it holds."""

    path: Path
    version: PolicyVersion


def _complete(folder: Path) -> list[Checkpoint]:
    """Complete checkpoints under ``folder``, oldest first."""
    found = []
    for marker in folder.glob(f"*/{_MARKER}"):
        try:
            version = PolicyVersion.parse(marker.parent.name)
        except UserError:
            continue
        found.append(Checkpoint(marker.parent, version))
    return sorted(found, key=lambda entry: entry.version)


def latest_complete(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint (latest lineage, then step), or None."""
    found = _complete(Path(folder))
    return found[-1] if found else None


class Checkpoints:
    """Saves and loads one trainer's checkpoints in ``folder``; keeps the newest ``keep``. All ranks call together.

    ``base`` is the digest of the weights that the model's adapters were put on (needed on rank 0 only), None: there are no adapters.
    """

    def __init__(self, folder: Path, ranks: Ranks, keep: int, base: str | None = None) -> None:
        self._folder = Path(folder)
        self._ranks = ranks
        self._keep = keep
        self._base = base

    def save(self, policy: Policy, optimizer: torch.optim.Optimizer, version: PolicyVersion) -> Checkpoint:
        """Write a checkpoint; when this returns it is complete and durable. Raises RunError when it cannot be written."""
        final = self._folder / str(version)
        partial = self._folder / f".{version}{_PARTIAL}"
        if self._ranks.leads:
            self._clear()
            partial.mkdir(parents=True)
        self._ranks.barrier()
        model_state, optimizer_state = _trained_state(policy, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "rng": {self._rng_key(): self._rng_state()}}
        try:
            with _quiet():
                dcp.save(state, checkpoint_id=str(partial), no_dist=self._ranks.world == 1)
        except (CheckpointException, OSError) as error:
            raise RunError(f"cannot write the checkpoint {final}: {_cause(error)}") from error
        self._ranks.barrier()
        if self._ranks.leads:
            state_file = {"version": str(version), "ranks": self._ranks.world, "base": self._base}
            (partial / _STATE).write_text(json.dumps(state_file))
            _fsync_tree(partial)
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
            publish_text(final / _MARKER, f"{version}\n")
            self._remove_old()
        self._ranks.barrier()
        return Checkpoint(final, version)

    def load(self, checkpoint: Checkpoint, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        """Restore model, optimizer and random state in place.

        Raises DataError when the checkpoint does not fit the model, or its adapters were trained on other weights.
        """
        self._ranks.decide(lambda: self._check_base(checkpoint))
        model_state, optimizer_state = _trained_state(policy, optimizer)
        saved = json.loads((checkpoint.path / _STATE).read_text())
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
        same_ranks = saved["ranks"] == self._ranks.world
        if same_ranks:
            state["rng"] = {self._rng_key(): self._rng_state()}
        try:
            with _quiet():
                dcp.load(state, checkpoint_id=str(checkpoint.path), no_dist=self._ranks.world == 1)
            set_state_dict(
                policy.model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
                options=StateDictOptions(strict=False),  # frozen parameters are missing
            )
        except (CheckpointException, RuntimeError, ValueError, KeyError, OSError) as error:
            text = f"{checkpoint.path} cannot be loaded into this model: {_cause(error)}"
            raise DataError("bad_checkpoint", text) from error
        if same_ranks:
            torch.set_rng_state(state["rng"][self._rng_key()])

    def _check_base(self, checkpoint: Checkpoint) -> None:
        base = json.loads((checkpoint.path / _STATE).read_text())["base"]
        if base != self._base:
            text = f"{checkpoint.path} belongs to {_named(base)}, but the configuration gives {_named(self._base)}"
            raise DataError("bad_checkpoint", f"{text}; resume with the model.path and lora that the run began with")

    def _rng_key(self) -> str:
        return f"rank{self._ranks.rank}"

    def _rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def _clear(self) -> None:
        """Remove what killed savers left behind."""
        for leftover in self._folder.glob(f".*{_PARTIAL}"):
            shutil.rmtree(leftover)

    def _remove_old(self) -> None:
        for old in _complete(self._folder)[: -self._keep]:
            # The marker first: a half-removed checkpoint must not look complete.
            (old.path / _MARKER).unlink()
            shutil.rmtree(old.path)


def _named(base: str | None) -> str:
    return "a model without adapters" if base is None else f"an adapter of the base weights with digest {base}"


def _trained_state(policy: Policy, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """State of model and optimizer without the model's frozen parameters (under any name: a tied head is one, too)."""
    model_state, optimizer_state = get_state_dict(policy.model, optimizer)
    named = policy.model.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in named if not parameter.requires_grad}
    return {name: value for name, value in model_state.items() if name not in frozen}, optimizer_state


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns about the absence of a process group even when told that there is none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _cause(error: BaseException) -> str:
    """One line; torch wraps each rank's error, with its traceback, in a CheckpointException."""
    if isinstance(error, CheckpointException):
        error = next((wrapped[0] for wrapped in error.failures.values()), error)
    return " ".join(str(error).split())[:500]


def _fsync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
