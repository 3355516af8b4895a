"""The file baseline's transport: a checkpoint on a shared file system, or fetched from the trainer's node over the limited link.

A file that another node has just written is in no reader's page cache. Without a link limit the pages are dropped and the reader
takes them from the disk; with one the bytes cross the link, as from an NFS server on the trainer's node (one stream per reader).
"""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

from hpcrl.errors import InfraError

__all__ = ["FileServer", "drop_cache", "fetch", "read_through"]

_BLOCK = 8 << 20


def drop_cache(path: Path) -> None:
    """Write ``path`` to the disk and forget its pages."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def read_through(path: Path) -> None:
    """Read a file to its end, as a replica without an engine would."""
    buffer = bytearray(_BLOCK)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


class FileServer:
    """Sends ``path`` to everyone who connects to a port of ``address``; a thread per reader."""

    def __init__(self, address: str, path: Path) -> None:
        self._listener = socket.create_server((address, 0))
        self._path = path
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return host, port

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, open(self._path, "rb") as file:
            connection.sendfile(file)


def fetch(address: tuple[str, int], target: Path, nbytes: int) -> None:
    """Fetch the server's file into ``target``. Raises InfraError when fewer than ``nbytes`` bytes arrive."""
    buffer, received = memoryview(bytearray(_BLOCK)), 0
    with socket.create_connection(address) as connection, open(target, "wb", buffering=0) as file:
        while count := connection.recv_into(buffer):
            file.write(buffer[:count])
            received += count
    if received < nbytes:
        raise InfraError("fetch", f"{received} of {nbytes} bytes arrived from {address[0]}")
