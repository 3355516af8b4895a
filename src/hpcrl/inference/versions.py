"""Which version a replica holds, and what it falls back to: a small state machine, pure.

    version None ── staged(v) ──▶ v is verified ── staged(w) ──▶ w …

``fallback`` is what a restarted or failed engine is loaded from: the last version whose flip succeeded, else the start weights.
Its staging file is not overwritten before this replica has flipped to another one (weights/staging.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Staged", "VersionHolder"]


@dataclass(frozen=True, slots=True)
class Staged:
    """A version whose bytes lie in a staging file."""

    version: str
    manifest: Path
    staging: Path


class VersionHolder:
    """The served version of a replica. ``initial`` names the start weights, or is None when they may not be served."""

    def __init__(self, initial: str | None) -> None:
        self._initial = initial
        self._staged: Staged | None = None

    @property
    def current(self) -> str | None:
        """The last version that was verified in the engine; None before the first."""
        return self._initial if self._staged is None else self._staged.version

    @property
    def fallback(self) -> Staged | None:
        """Where the current version can be loaded from; None means the start weights."""
        return self._staged

    @property
    def start_version(self) -> str | None:
        """The name under which a freshly started engine's weights may be served; None when it must be loaded first."""
        return self._initial if self._staged is None else None

    def verified(self, staged: Staged) -> None:
        """A flip to ``staged`` has succeeded."""
        self._staged = staged
