"""Keys of a task.toml that look like a slip of the pen, pure. Others that are unknown here are left alone: Harbor may have new ones."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

__all__ = ["misspelt"]

_ANYWHERE = ("network_mode", "allowed_hosts")
_SECTIONS = {
    "agent": ("timeout_sec", "user", *_ANYWHERE),
    "verifier": ("timeout_sec", "env", "user", "environment_mode", "environment", "collect", *_ANYWHERE),
    "solution": ("env",),
    "environment": (
        *(
            "image",
            "docker_image",
            "workdir",
            "env",
            "memory_mb",
            "storage_mb",
            "cpus",
            "build_timeout_sec",
            "allow_internet",
        ),
        *("gpus", "gpu_types", "memory", "storage", "mcp_servers", "skills_dir", "healthcheck", *_ANYWHERE),
        *("os", "tpu"),
    ),
}
"""Harbor's sections and keys (its task format up to schema version 1.4), and hpcrl's `image`."""
_TOP = (
    *_SECTIONS,
    "version",
    "schema_version",
    "task",
    "metadata",
    "source",
    "steps",
    "artifacts",
    "multi_step_reward_strategy",
)
_ALIKE = 0.75


def misspelt(table: Mapping[str, Any]) -> list[str]:
    """One line per key that is unknown where it stands and known elsewhere, or much like a known one.

    >>> misspelt({"agent": {"timout_sec": 60}})
    ['unknown key [agent] timout_sec; did you mean timeout_sec?']
    """
    found = [_hint("", key, _TOP) for key in table]
    for section, keys in _SECTIONS.items():
        part = table.get(section)
        if isinstance(part, Mapping):
            found += [_hint(section, key, keys) for key in part]
    return [line for line in found if line]


def _hint(section: str, key: str, allowed: tuple[str, ...]) -> str:
    if key in allowed:
        return ""
    name = f"[{section}] {key}" if section else key
    homes = [f"[{other}]" for other, keys in _SECTIONS.items() if key in keys]
    if homes:
        return f"{name} has no effect here; {key} belongs to {' or '.join(homes)}"
    near = difflib.get_close_matches(key, allowed, n=1, cutoff=_ALIKE)
    return f"unknown key {name}; did you mean {near[0]}?" if near else ""
