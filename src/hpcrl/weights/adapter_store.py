"""The adapters beside a replica: one directory per version, in memory, for as long as vLLM may read it.

    hpcrl-<run_id>-<replica>.adapters/L.S/    mode 0700; the owner holds an exclusive flock on the outer directory

Like the double buffer, whatever can be locked has no owner and is removed at start (staging.remove_leftovers).
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import TracebackType

from hpcrl.errors import DataError, EnvironmentFault, InfraError
from hpcrl.weights.adapter import write_adapter
from hpcrl.weights.manifest import Manifest
from hpcrl.weights.staging import ADAPTERS_SUFFIX, DEFAULT_DIRECTORY, remove_leftovers, safe_name, try_lock

__all__ = ["AdapterStore"]


class AdapterStore:
    """A context manager; leaving it removes everything. Raises EnvironmentFault when the directory cannot be used."""

    def __init__(self, run_id: str, replica: str, directory: Path = DEFAULT_DIRECTORY) -> None:
        remove_leftovers(directory)
        self.root = directory / f"hpcrl-{safe_name(run_id, replica)}{ADAPTERS_SUFFIX}"
        self._descriptor = _make_locked(self.root)

    def write(self, manifest: Manifest, staging: Path) -> Path:
        """The directory of a version, made out of its staging file, which may be overwritten afterwards.

        Raises InfraError("staging_full", "adapter_files").
        """
        directory = self.root / manifest.version
        try:
            write_adapter(manifest, memoryview(staging.read_bytes()), directory)
        except (OSError, DataError) as error:
            shutil.rmtree(directory, ignore_errors=True)
            full = isinstance(error, OSError) and error.errno == errno.ENOSPC
            reason = "staging_full" if full else "adapter_files"
            raise InfraError(reason, f"cannot write the adapter {directory}: {error}") from error
        return directory

    def remove(self, version: str) -> None:
        """Forget a version that nothing will read any more."""
        shutil.rmtree(self.root / version, ignore_errors=True)

    def close(self) -> None:
        """Remove everything. May be called at any time, more than once."""
        if self._descriptor >= 0:
            shutil.rmtree(self.root, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> AdapterStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _make_locked(path: Path) -> int:
    """Make and lock a directory. Another process may sweep it between the two calls: look, and try again."""
    for _ in range(10):
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise EnvironmentFault(f"cannot make the adapters' directory {path}: {error.strerror}") from error
        if not try_lock(descriptor):
            os.close(descriptor)
            raise EnvironmentFault(f"the adapters' directory {path} belongs to a process that is still running")
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)
    raise EnvironmentFault(f"the adapters' directory {path} is removed again and again by another process")
