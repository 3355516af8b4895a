"""The artifact of an attempt: what changed in its work directory, as a deterministic tar (equal changes, equal bytes).

member order   by path; owner, group and times are zero; modes without set-id bits
files          content; hard links become separate files
links          only relative ones that stay inside the work directory: one that leaves it could show the private tests to
               the verifier under an agent's name
deletions      the global header ``HPCRL.deleted``: a JSON list of paths
anything else  FIFOs, sockets and devices are left out
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import io
import json
import os
import stat
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hpcrl.errors import DataError, PolicyError
from hpcrl.sandbox.trees import MAX_DEPTH, Entry, TreeTooDeep, make_link, open_parent, read_file, walk, write_file

__all__ = ["Applied", "Declared", "apply_artifact", "link_stays_inside", "pack", "restrict"]

_FORMAT = "1"

# What an entry costs besides its content: many empty files are a large archive too.
_MEMBER_BYTES = 1024

# Failures that a hand-made archive can cause; any other (no space, input/output) is the machine's.
_OF_THE_ARCHIVE = (
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ENOENT,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.EINVAL,
)


def link_stays_inside(path: str, target: str) -> bool:
    """Whether the link at ``path`` with ``target`` points inside the tree, judged by text alone.

    Example: ``link_stays_inside("a/b", "../c")`` is True, ``("a", "../c")`` and ``("a", "/etc/passwd")`` are False.
    """
    if not target or target.startswith("/"):
        return False
    depth = path.count("/")
    for part in target.split("/"):
        depth += {"": 0, ".": 0, "..": -1}.get(part, 1)
        if depth < 0:
            return False
    return True


def pack(root: int, changed: Callable[[Entry], bool], known: Iterable[str], max_bytes: int) -> bytes:
    """Pack the entries below the open directory ``root`` for which ``changed`` holds; ``known`` paths that are gone are deletions.

    No process of the agent may be left. Raises PolicyError("artifact_limit") past ``max_bytes`` or MAX_DEPTH.
    """
    members: list[tuple[tarfile.TarInfo, bytes]] = []
    seen: set[str] = set()
    size = 0
    try:
        for entry in walk(root, make_accessible=True):
            seen.add(entry.path)
            if not changed(entry):
                continue
            member = _member(entry)
            if member is None:
                continue
            size += _MEMBER_BYTES + len(os.fsencode(entry.path + member.linkname))
            size += entry.info.st_size if member.isreg() else 0
            if size > max_bytes:
                raise PolicyError("artifact_limit", f"the changed files are larger than {max_bytes} bytes")
            content = b""
            if member.isreg():
                content = _content(entry)
                member.size = len(content)
            members.append((member, content))
    except TreeTooDeep as error:
        raise PolicyError("artifact_limit", f"directories are nested deeper than {MAX_DEPTH} levels") from error
    deleted = sorted(set(known) - seen)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(_first(deleted))
        for member, content in sorted(members, key=lambda item: item[0].name):
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _member(entry: Entry) -> tarfile.TarInfo | None:
    member = tarfile.TarInfo(entry.path)
    member.mode = stat.S_IMODE(entry.info.st_mode) & 0o777
    kind = stat.S_IFMT(entry.info.st_mode)
    if kind == stat.S_IFREG:
        return member
    if kind == stat.S_IFDIR:
        member.type = tarfile.DIRTYPE
        return member
    if kind == stat.S_IFLNK:
        target = os.readlink(entry.name, dir_fd=entry.parent)
        member.type, member.linkname, member.mode = tarfile.SYMTYPE, target, 0o777
        return member if link_stays_inside(entry.path, target) else None
    return None


def _content(entry: Entry) -> bytes:
    try:
        return read_file(entry.parent, entry.name, entry.info.st_size)
    except PermissionError:
        os.chmod(entry.name, stat.S_IMODE(entry.info.st_mode) | 0o600, dir_fd=entry.parent)
        return read_file(entry.parent, entry.name, entry.info.st_size)


@dataclass(frozen=True, slots=True)
class Declared:
    """A path in the work directory ("." for all of it) that goes to the verifier, without what ``exclude`` names.

    Example: ``Declared("src", ("*.pyc", "vendor"))``. A pattern (fnmatch) holds for the path below ``path``, for the directories above
    it, and where it has no "/" for each of their names.
    """

    path: str
    exclude: tuple[str, ...] = ()

    def keeps(self, path: str) -> bool:
        """Whether ``path``, relative to the work directory, belongs to it."""
        if self.path == ".":
            below = path
        elif path == self.path:
            return True
        elif path.startswith(self.path + "/"):
            below = path[len(self.path) + 1 :]
        else:
            return False
        parts = below.split("/")
        above = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        return not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.exclude for name in (*above, *parts))


def restrict(artifact: bytes, declared: tuple[Declared, ...]) -> bytes:
    """What of an artifact was declared, as an artifact. Raises DataError("artifact_corrupt")."""
    buffer = io.BytesIO()
    try:
        with (
            tarfile.open(fileobj=io.BytesIO(artifact), mode="r:") as whole,
            tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as part,
        ):
            first, *members = whole.getmembers()
            deleted = [
                path for path in json.loads(first.pax_headers["HPCRL.deleted"]) if any(d.keeps(path) for d in declared)
            ]
            part.addfile(_first(deleted))
            for member in members:
                if any(d.keeps(member.name) for d in declared):
                    part.addfile(member, whole.extractfile(member) if member.isreg() else None)
    except (tarfile.TarError, KeyError, ValueError, EOFError, TypeError, AttributeError) as error:
        raise DataError("artifact_corrupt", str(error)) from error
    return buffer.getvalue()


def _first(deleted: list[str]) -> tarfile.TarInfo:
    """The member that carries the format and the deletions."""
    first = tarfile.TarInfo(".")
    first.type, first.mode = tarfile.DIRTYPE, 0o755
    first.pax_headers = {"HPCRL.artifact": _FORMAT, "HPCRL.deleted": json.dumps(deleted, separators=(",", ":"))}
    return first


@dataclass(frozen=True, slots=True)
class Applied:
    """What an artifact did to a work directory."""

    written: int
    deleted: int
    refused: int


def apply_artifact(artifact: bytes, root: int, owner: int | None, max_bytes: int) -> Applied:
    """Apply an artifact to the open directory ``root`` (a fresh copy of the environment's files).

    Nothing outside ``root`` can be reached, whatever the archive contains: members with a path or link that leaves it, or of
    another kind, are refused and counted. Raises DataError("artifact_corrupt") when it is no artifact or unpacks to too much, and
    OSError when the file system fails.
    """
    written = refused = 0
    left = max_bytes
    try:
        with tarfile.open(fileobj=io.BytesIO(artifact), mode="r:") as archive:
            first, *members = archive.getmembers()
            if first.pax_headers.get("HPCRL.artifact") != _FORMAT:
                raise DataError("artifact_corrupt", "the archive is not an artifact of hpcrl")
            deleted = json.loads(first.pax_headers["HPCRL.deleted"])
            removed = sum(_delete(root, path) for path in reversed(deleted))
            for member in members:
                left -= member.size
                if left < 0:
                    raise DataError("artifact_corrupt", f"the artifact unpacks to more than {max_bytes} bytes")
                extracted = archive.extractfile(member) if member.isreg() else None
                content = extracted.read() if extracted is not None else b""
                if _apply(root, member, content, owner):
                    written += 1
                else:
                    refused += 1
    except (tarfile.TarError, KeyError, ValueError, EOFError) as error:
        raise DataError("artifact_corrupt", str(error)) from error
    return Applied(written, removed, refused)


def _apply(root: int, member: tarfile.TarInfo, content: bytes, owner: int | None) -> bool:
    try:
        with open_parent(root, member.name, create=True, owner=owner) as (parent, name):
            if member.isdir():
                _make_way(parent, name, directory=True)
                if not _is_directory(parent, name):
                    os.mkdir(name, 0o755, dir_fd=parent)
                    if owner is not None:
                        os.chown(name, owner, owner, dir_fd=parent, follow_symlinks=False)
                os.chmod(name, member.mode & 0o777 | 0o700, dir_fd=parent)
            elif member.isreg():
                _make_way(parent, name, directory=False)
                write_file(parent, name, content, member.mode & 0o777 | 0o400, owner)
            elif member.issym() and link_stays_inside(member.name, member.linkname):
                _make_way(parent, name, directory=False)
                make_link(parent, name, member.linkname, owner)
            else:
                return False
    except ValueError:
        return False
    except OSError as error:
        if error.errno in _OF_THE_ARCHIVE:
            return False
        raise
    return True


def _is_directory(parent: int, name: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _make_way(parent: int, name: str, directory: bool) -> None:
    """A path may have changed its kind: remove what stands there when the kinds differ."""
    if _is_directory(parent, name) == directory:
        return
    if directory:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)
    else:
        _delete(parent, name)


def _delete(root: int, path: object) -> bool:
    """Remove a file, link or directory with its content; False when it is not there or not a path inside."""
    if not isinstance(path, str):
        return False
    try:
        with open_parent(root, path) as (parent, name):
            if not _is_directory(parent, name):
                os.unlink(name, dir_fd=parent)
                return True
            child = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
            try:
                for inner in sorted(os.listdir(child), reverse=True):
                    _delete(child, inner)
            finally:
                os.close(child)
            os.rmdir(name, dir_fd=parent)
            return True
    except (OSError, ValueError):
        return False
