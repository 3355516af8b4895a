"""Opening ``coordinator.db``: for the one coordinator that writes it, or for a look at a run that is not being served.

``synchronous=FULL``: one fsync per group commit costs latency only, and a checkpoint of the trainer must never know of
consumptions that the database lost with the node. ``locking_mode=EXCLUSIVE``: needs no shared-memory file (unsafe on network file
systems) and lets no second coordinator in, also one on another node, as far as the file system's locks reach; where POSIX record
locks do not exclude, the coordinator refuses to start. (flock is not used.)
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path
from sqlite3 import SQLITE_CORRUPT, SQLITE_NOTADB, Connection, Error, connect

from hpcrl.coordinator.migrations import migrate
from hpcrl.coordinator.tables import INDEXES, SCHEMA_VERSION, TABLES
from hpcrl.errors import EnvironmentFault, UserError

__all__ = ["create_tables", "database_schema", "open_database", "open_for_reading", "require_locks"]

_CACHE_KIB = 64 * 1024
_CHECKPOINT_PAGES = 8192
"""WAL pages (4 KiB) between checkpoints: fewer, larger ones cost less than one every few commits."""

_TRY_LOCK = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit(7)
"""
_LOCKED_OUT = 7


def require_locks(directory: Path) -> None:
    """Check that a record lock held here keeps another process out. Raises EnvironmentFault naming the directory."""
    hint = "put the run directory (run.dir) on a file system with working POSIX locks"
    path = directory / ".lock-check"
    try:
        with open(path, "wb") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            other = subprocess.run([sys.executable, "-I", "-S", "-c", _TRY_LOCK, str(path)], capture_output=True)
    except OSError as error:
        raise EnvironmentFault(f"{directory} cannot lock files: {error.strerror}; {hint}") from error
    finally:
        path.unlink(missing_ok=True)
    if other.returncode != _LOCKED_OUT:
        raise EnvironmentFault(f"{directory}: a locked file does not keep a second process out; {hint}")


def open_database(path: Path) -> Connection:
    """Open or create the database, bringing an older schema up to date.

    Raises EnvironmentFault: locked by another process, a newer schema, damaged, not writable.
    """
    connection = _connect(path)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
        connection.execute("BEGIN IMMEDIATE")
        found = database_schema(connection)
        if found is not None and found > SCHEMA_VERSION:
            raise EnvironmentFault(
                f"{path} has schema {found}, this hpcrl reads up to {SCHEMA_VERSION}: use the version that wrote it"
            )
        if found is not None:
            migrate(connection, found)
        create_tables(connection)
        connection.execute("COMMIT")
    except Error as error:
        connection.close()
        raise _cannot_open(path, error) from error
    except EnvironmentFault:
        connection.close()
        raise
    return connection


def create_tables(connection: Connection) -> None:
    """Create what is missing of the present schema."""
    for table in TABLES.values():
        connection.execute(table.create)
    for index in INDEXES:
        connection.execute(index)
    connection.execute(TABLES["meta"].write(), ("schema", str(SCHEMA_VERSION)))


def open_for_reading(path: Path) -> Connection:
    """Open the database of a run that no coordinator serves now; nothing can be written through the connection.

    Raises UserError when there is none or its schema is another, EnvironmentFault when a coordinator runs on it or it is damaged.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist: the run has not begun")
    connection = _connect(path)
    try:
        # Begins by taking the lock, which also brings in what a killed coordinator left in the write-ahead log.
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
        connection.execute("PRAGMA query_only=ON")
        found = database_schema(connection)
    except Error as error:
        connection.close()
        raise _cannot_open(path, error) from error
    if found != SCHEMA_VERSION:
        connection.close()
        raise UserError(f"{path} has schema {found}, this hpcrl reads {SCHEMA_VERSION}; a resume brings it up to date")
    return connection


def database_schema(connection: Connection) -> int | None:
    """Number of the schema; None for an empty database."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
        return None
    row = connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    return None if row is None else int(row[0])


def _connect(path: Path) -> Connection:
    try:
        connection = connect(path, isolation_level=None, timeout=5.0, check_same_thread=False)
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
    except Error as error:
        raise _cannot_open(path, error) from error
    return connection


def _cannot_open(path: Path, error: Error) -> EnvironmentFault:
    # The low byte is the primary code; errors of Python's own sqlite3 module carry none.
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in (SQLITE_CORRUPT, SQLITE_NOTADB):
        return EnvironmentFault(f"{path} is damaged: {error}; put a whole copy in its place, or begin a new run")
    hint = "is another coordinator running on it?" if "locked" in str(error) else "is the run directory writable?"
    return EnvironmentFault(f"cannot open {path}: {error}; {hint}")
