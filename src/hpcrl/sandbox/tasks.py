"""Tasks in Harbor format: the public part, which is all that a harness may see.

    TASK/instruction.md                 what the agent is told
         task.toml                      [agent] timeout_sec   [environment] docker_image|image, workdir, env, memory_mb, storage_mb
                                        artifacts, with [verifier] environment_mode = "separate"
         environment/files/             copied into the work directory
         environment/Dockerfile, …      built when `image` names it; its WORKDIR holds where task.toml has no workdir
         tests/, solution/              private: scoring.private reads them, nothing here does

What hpcrl cannot honour is refused by name (harbor.py); other keys that it does not use are left alone.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from hpcrl.errors import UserError
from hpcrl.sandbox.artifact import Declared
from hpcrl.sandbox.base import SandboxSpec
from hpcrl.sandbox.digests import combine, tree_digest
from hpcrl.sandbox.dockerfile import last_workdir
from hpcrl.sandbox.harbor import declared_artifacts, literal, megabytes, refuse_unsupported
from hpcrl.sandbox.images import Image
from hpcrl.sandbox.limits import Limits

__all__ = ["Task", "list_tasks", "load_task", "read_toml", "sandbox_spec", "value_of", "variables_of"]

_MIB = 1024 * 1024
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN_PATH = re.compile(r"/[^,:\"\\\n]*")
_TAKEN = frozenset(
    {"bin", "boot", "etc", "home", "lib", "lib32", "lib64", "opt", "run", "sbin", "srv", "tmp", "usr", "var"}
)
"""Not to be hidden, but a directory below may be the work directory."""
_TAKEN_TREES = frozenset({"dev", "logs", "proc", "sys", "tests"})
_LARGEST = 1e9
"""Of a task's limits: seconds, MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Example: ``Task(task_id="repair-train-0000", instruction="Make sega…", workdir="/work", …)``. Times in seconds."""

    task_id: str
    directory: Path
    instruction: str
    image: str | None
    """Image named by the task; None: the run's own (`sandbox.image`)."""
    workdir: str
    env: dict[str, str]
    files: Path | None
    """Directory whose content the agent finds in its work directory."""
    agent_timeout_s: float | None
    memory_mib: int | None
    storage_mib: int | None
    files_digest: str
    """Digest of environment/ and of what task.toml says about it, without the image."""
    artifacts: tuple[Declared, ...] | None = None
    """Paths in the work directory that the verifier gets of what the agent changed; None: everything."""

    def environment_version(self, image: Image) -> str:
        """What the agent's surroundings were: image and task files, one digest."""
        return combine(image.digest, self.files_digest)


def load_task(directory: Path) -> Task:
    """Read a task. Raises UserError naming the file and key that cannot be used."""
    directory = Path(directory).resolve()
    where = directory / "task.toml"
    table = read_toml(where)
    refuse_unsupported(table, directory)
    try:
        instruction = (directory / "instruction.md").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{directory / 'instruction.md'}: cannot be read ({error}); a Harbor task needs it") from error
    if not instruction:
        raise UserError(f"{directory / 'instruction.md'}: is empty; it must say what the agent is to do")
    image = value_of(table, "environment", "image", str, where) or value_of(
        table, "environment", "docker_image", str, where
    )
    workdir = value_of(table, "environment", "workdir", str, where) or _image_workdir(directory) or "/work"
    _check_workdir(workdir, where)
    env = variables_of(table, "environment", where)
    environment = directory / "environment"
    files = environment / "files"
    content = tree_digest(environment) if environment.is_dir() else ""
    settings = "\n".join(f"{name}={value}" for name, value in sorted(env.items()))
    return Task(
        task_id=directory.name,
        directory=directory,
        instruction=instruction,
        image=image,
        workdir=workdir,
        env=env,
        files=files if files.is_dir() else None,
        agent_timeout_s=_positive(table, "agent", "timeout_sec", where),
        memory_mib=_mib(table, "memory", where),
        storage_mib=_mib(table, "storage", where),
        files_digest=combine(content, workdir, settings),
        artifacts=declared_artifacts(table, workdir, where),
    )


def list_tasks(directory: Path) -> list[Path]:
    """Task directories (those with a task.toml) below ``directory``, by name. Raises UserError when there is none."""
    directory = Path(directory)
    try:
        found = sorted(path.parent.resolve() for path in directory.glob("*/task.toml"))
    except OSError as error:
        raise UserError(f"task set {directory} cannot be read: {error.strerror}") from error
    if not found:
        problem = "holds no tasks" if directory.is_dir() else "is no directory"
        raise UserError(
            f"{directory} {problem}: expected directories in Harbor format (task.toml, instruction.md, tests/) directly below"
        )
    return found


def sandbox_spec(task: Task, image: Image | None, limits: Limits) -> SandboxSpec:
    """The agent's sandbox: the task's files, and the stricter of the run's limits and the task's."""
    memory = task.memory_mib * _MIB if task.memory_mib is not None else limits.memory_bytes
    disk = task.storage_mib * _MIB if task.storage_mib is not None else limits.disk_bytes
    stricter = replace(
        limits,
        memory_bytes=min(limits.memory_bytes, memory),
        disk_bytes=min(limits.disk_bytes, disk),
        file_bytes=min(limits.file_bytes, disk),
    )
    return SandboxSpec(
        image=image.path if image is not None else None,
        workdir=task.workdir,
        files=(task.files,) if task.files is not None else (),
        env=task.env,
        limits=stricter,
    )


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a task.toml. Raises UserError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} is no task: it has no {path.name}") from None
    except (
        OSError,
        ValueError,
        RecursionError,
    ) as error:  # ValueError: not TOML, not UTF-8, a number of thousands of digits
        raise UserError(f"{path}: {error}") from error


def value_of(table: dict[str, Any], section: str, key: str, kind: type | tuple[type, ...], where: Path) -> Any:
    """``table[section][key]``, or None when absent. Raises UserError when it has another type."""
    part = table.get(section, {})
    if not isinstance(part, dict):
        raise UserError(f"{where}: {section} must be a table ([{section}])")
    value = part.get(key)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise UserError(f"{where}: [{section}] {key} is {value!r}; expected {' or '.join(k.__name__ for k in kinds)}")
    return value


def variables_of(table: dict[str, Any], section: str, where: Path) -> dict[str, str]:
    """``[section] env``. Raises UserError for what no environment can hold."""
    env: dict[str, Any] = value_of(table, section, "env", dict, where) or {}
    for name, value in env.items():
        if not isinstance(value, str) or "\0" in value:
            raise UserError(
                f"{where}: [{section}] env must map names to strings, but {name} is {value!r}; put it in quotes"
            )
        if not _VARIABLE.fullmatch(name):
            raise UserError(
                f"{where}: [{section}] env has {name!r}, which is no name of a variable (letters, digits and _, no digit first)"
            )
    return {name: literal(value, f"{where}: [{section}] env {name}") for name, value in env.items()}


def _check_workdir(workdir: str, where: Path) -> None:
    """Where the agent's files are mounted: must hide nothing that a sandbox or the verifier needs."""
    path = PurePosixPath(workdir)
    if not workdir.startswith("/") or ".." in path.parts or len(path.parts) < 2:
        raise UserError(f"{where}: [environment] workdir is {workdir!r}; it must be an absolute path other than /")
    if not _PLAIN_PATH.fullmatch(workdir):
        raise UserError(
            f"{where}: [environment] workdir is {workdir!r}; it must have no comma, colon, quote, backslash or line break"
        )
    if path.parts[1] in _TAKEN_TREES or (len(path.parts) == 2 and path.parts[1] in _TAKEN):
        raise UserError(
            f"{where}: [environment] workdir is {workdir!r}, where the system of the sandbox or the verifier has its own files; "
            "take another directory, such as /work or /app"
        )


def _positive(table: dict[str, Any], section: str, key: str, where: Path) -> float | None:
    value = value_of(table, section, key, (int, float), where)
    if value is not None and not 0 < value < _LARGEST:
        raise UserError(
            f"{where}: [{section}] {key} is {str(value)[:40]}; it must be a positive number below {_LARGEST:g}"
        )
    return float(value) if value is not None else None


def _mib(table: dict[str, Any], key: str, where: Path) -> int | None:
    """``KEY_mb``, or ``KEY`` ("2G") as older files have it."""
    value = _positive(table, "environment", key + "_mb", where)
    if value is None:
        return megabytes(value_of(table, "environment", key, str, where), key, where)
    return int(value)


def _image_workdir(directory: Path) -> str | None:
    """Where commands of the task's own image start."""
    dockerfile = directory / "environment" / "Dockerfile"
    if not dockerfile.is_file():
        return None
    return last_workdir(dockerfile.read_text(encoding="utf-8", errors="replace"))
