"""Lock files (flock) that say whether somebody still lives: a worker, or who uses an image."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["alone", "is_free"]


@contextmanager
def alone(lock: Path, create: bool = True) -> Iterator[bool]:
    """Hold ``lock`` exclusively, for the block; yields False when somebody else holds it.

    Raises OSError, FileNotFoundError when it is not there and not to be made.
    """
    descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def is_free(lock: Path) -> bool:
    """Whether nobody holds ``lock``: also where there is none, but not where it is somebody else's and cannot be opened."""
    try:
        with alone(lock, create=False) as free:
            return free
    except FileNotFoundError:
        return True
    except OSError:
        return False
