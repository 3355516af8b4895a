"""Harbor's task.toml, schema versions 1.0 to 1.4: what hpcrl refuses by name, and how values are written. Pure but for one look.

Source: Harbor's task configuration (``harbor.models.task.config``), version 0.25.

    refused    [[steps]]; Windows; GPUs, TPUs; MCP servers; a health check; several containers (docker-compose.yaml); a verifier with
               an image or collect commands of its own; a ``${VARIABLE}`` of the host without a default
    as Harbor  ``${NAME:-value}`` in env; "2G" for memory and storage; ``artifacts`` with ``environment_mode = "separate"``
    differs    there is never a network, whatever network_mode says; agent and tests are one ordinary user, whatever ``user`` says
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from hpcrl.errors import UserError
from hpcrl.sandbox.artifact import Declared

__all__ = ["declared_artifacts", "literal", "megabytes", "refuse_unsupported", "remarks"]

_VERSION = re.compile(r"1(\.\d+)*")
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([GMK])B?", re.IGNORECASE)
_MEGABYTES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


def refuse_unsupported(table: Mapping[str, Any], directory: Path) -> None:
    """Raises UserError naming what a task asks for that would not be honoured."""
    where = directory / "task.toml"
    for key in ("schema_version", "version"):
        version = table.get(key)
        if version is not None and not _VERSION.fullmatch(str(version)):
            raise UserError(f"{where}: {key} is {version!r}; known are 1.0 to 1.4 (a later 1.x is read as 1.4)")
    environment, verifier = _part(table, "environment"), _part(table, "verifier")
    asked = {
        "[[steps]] (a task of several steps)": table.get("steps"),
        "[environment] os": str(environment.get("os", "linux")).lower() not in ("linux", ""),
        "[environment] gpus": environment.get("gpus"),
        "[environment] tpu": environment.get("tpu"),
        "[environment] mcp_servers": environment.get("mcp_servers"),
        "[environment.healthcheck]": environment.get("healthcheck"),
        "environment/docker-compose.yaml (several containers)": (
            directory / "environment" / "docker-compose.yaml"
        ).exists(),
        "[verifier.environment] (an image for the verifier alone)": verifier.get("environment"),
        "[[verifier.collect]]": verifier.get("collect"),
    }
    found = [name for name, value in asked.items() if value]
    if found:
        raise UserError(f"{where}: {', '.join(found)}: not supported; such a task would not mean here what it says")


def _part(table: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    part = table.get(section)
    return part if isinstance(part, Mapping) else {}


def literal(value: str, what: str) -> str:
    """The value of an env entry. The host's environment is never read: ``${NAME:-x}`` is x, ``${NAME}`` a UserError naming ``what``."""
    match = _TEMPLATE.fullmatch(value)
    if match is None:
        return value
    if match[2] is None:
        raise UserError(
            f"{what} is {value}: sandboxes get nothing of the host's environment; write the value itself, or {value[:-1]}:-DEFAULT}}"
        )
    return match[2]


def megabytes(size: str | None, key: str, where: Path) -> int | None:
    """``"2G"`` → 2048. Raises UserError."""
    if size is None:
        return None
    match = _SIZE.fullmatch(size.strip())
    if match is None or not float(match[1]) * _MEGABYTES[match[2].upper()] >= 1:
        raise UserError(f"{where}: [environment] {key} is {size!r}; expected a size such as 512M or 2G")
    return int(float(match[1]) * _MEGABYTES[match[2].upper()])


def declared_artifacts(table: Mapping[str, Any], workdir: str, where: Path) -> tuple[Declared, ...] | None:
    """Paths relative to ``workdir`` that alone go to a separate verifier; None: everything the agent changed there does.

    Raises UserError for a path outside of the work directory, which does not outlive the agent's sandbox.
    """
    mode = _part(table, "verifier").get("environment_mode")
    if mode not in (None, "shared", "separate"):
        raise UserError(f"{where}: [verifier] environment_mode is {mode!r}; allowed are shared and separate")
    entries = _entries(table, where)
    if mode != "separate":
        return None
    found = []
    for source, exclude in entries:
        path = PurePosixPath(workdir) / source
        if ".." in path.parts or not path.is_relative_to(workdir):
            raise UserError(
                f"{where}: artifacts has {source}, outside of the work directory {workdir}: only what lies there outlives the "
                "agent's sandbox"
            )
        found.append(Declared(str(path.relative_to(workdir)), exclude))
    return tuple(found)


def _entries(table: Mapping[str, Any], where: Path) -> list[tuple[str, tuple[str, ...]]]:
    """(source, exclude) of each entry of ``artifacts``."""
    entries = table.get("artifacts", [])
    if not isinstance(entries, list):
        raise UserError(f"{where}: artifacts must be a list")
    return [_entry(entry, where) for entry in entries]


def _entry(entry: object, where: Path) -> tuple[str, tuple[str, ...]]:
    parts: Mapping[str, Any] = (
        {"source": entry} if isinstance(entry, str) else entry if isinstance(entry, Mapping) else {}
    )
    source, exclude = parts.get("source"), parts.get("exclude") or []
    if (
        not isinstance(source, str)
        or not source
        or not isinstance(exclude, list)
        or not all(isinstance(e, str) for e in exclude)
    ):
        raise UserError(
            f"{where}: artifacts must be a list of paths, or of tables with `source` and perhaps a list `exclude`"
        )
    if parts.get("service") not in (None, "main"):
        raise UserError(f"{where}: artifacts of the service {parts['service']!r}: there is one container only")
    return source, tuple(exclude)


def remarks(table: Mapping[str, Any], directory: Path) -> list[str]:
    """What means something else here than the file may say, one line each, for people."""
    found = []
    environment = _part(table, "environment")
    network = [
        environment.get("network_mode"),
        *(_part(table, part).get("network_mode") for part in ("agent", "verifier")),
    ]
    if environment.get("allow_internet") or any(mode not in (None, "no-network") for mode in network):
        found.append("asks for a network: there is none, for the agent or for the tests")
    for part in ("agent", "verifier"):
        user = _part(table, part).get("user")
        if user not in (None, "root", 0):
            found.append(f"[{part}] user is {user!r}: commands run as one ordinary user")
    if (directory / "environment" / "Dockerfile").exists() and not (
        environment.get("image") or environment.get("docker_image")
    ):
        found.append(
            'environment/Dockerfile is not built: the run\'s sandbox.image is used (image = "environment/Dockerfile" builds it)'
        )
    return found
