"""Artifacts in the run directory, named by digest: equal artifacts are stored once, and what is read is verified.

runs/RUN/artifacts/sha256-9f…    an archive as packed by sandbox.artifact
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from hpcrl.errors import DataError
from hpcrl.protocol.rundir import RunDir, publish

__all__ = ["digest_of", "load_artifact", "store_artifact"]


def digest_of(artifact: bytes) -> str:
    """``sha256-`` and 64 hex digits."""
    return "sha256-" + hashlib.sha256(artifact).hexdigest()


def store_artifact(run_dir: RunDir, artifact: bytes) -> tuple[str, str]:
    """Store; returns (path relative to the run directory, digest). Raises OSError."""
    digest = digest_of(artifact)
    path = run_dir.artifacts / digest
    if not path.exists():
        with publish(path) as temporary:
            temporary.write_bytes(artifact)
    return str(path.relative_to(run_dir.root)), digest


def load_artifact(run_dir: RunDir, relative: str, digest: str) -> bytes:
    """Read back. Raises DataError("artifact_missing" | "artifact_corrupt")."""
    path = run_dir.root / relative
    if Path(relative).is_absolute() or ".." in Path(relative).parts:
        raise DataError("artifact_corrupt", f"{relative!r} is not a path inside the run directory")
    try:
        artifact = path.read_bytes()
    except OSError as error:
        raise DataError("artifact_missing", f"{path}: {error.strerror}") from error
    if digest_of(artifact) != digest:
        raise DataError("artifact_corrupt", f"{path} does not have the digest it was stored under")
    return artifact
