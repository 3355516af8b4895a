"""``hpcrl doctor``: what of this machine and its Slurm works: ok, slow or broken, the cause, what to do, who can do it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hpcrl.cli import doctor_checks as checks
from hpcrl.errors import HpcrlError

__all__ = ["doctor"]

_COLOURS = {"ok": "green", "slow": "yellow", "broken": "red"}

CHECKS: dict[str, Callable[[], str]] = {
    "Slurm": checks.slurm_answers,
    "PMI": checks.pmi_plugin,
    "Slurm settings": checks.slurm_settings,
    **checks.here,
}
"""Name → check; with those of a partition's nodes these are all."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One row. ``who``: user or admin; empty where nothing is to be done."""

    check: str
    state: str
    detail: str
    todo: str = ""
    who: str = ""


def doctor(config: Path | None, partitions: list[str] | None = None, as_json: bool = False) -> bool:
    """Print the table; True when nothing is broken. ``partitions``: also start one task on a node of each (None: the default one's)."""
    chosen = dict(CHECKS)
    if "Slurm" in chosen:
        places: list[str | None] = [*partitions] if partitions else [None]
        for partition in places:
            name = f" of {partition}" if partition else ""
            chosen[f"nodes{name}"] = partial(checks.nodes_are_up, partition)
            chosen[f"a step on a node{name}"] = partial(checks.on_nodes, partition)
    if config is not None:
        chosen["configuration"] = lambda: _configuration(config)
    findings: list[Finding] = []
    for name, check in chosen.items():
        if name.startswith(_NEEDS_SLURM) and any(one.check == "Slurm" and one.state == "broken" for one in findings):
            continue
        findings.append(_asked(name, check))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        _print(findings)
    return all(finding.state != "broken" for finding in findings)


_NEEDS_SLURM = ("PMI", "Slurm settings", "nodes", "a step")


def _asked(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, "ok", check())
    except checks.Fault as fault:
        return Finding(name, "slow" if fault.slow else "broken", fault.cause, fault.todo, fault.who)
    except (HpcrlError, OSError, subprocess.TimeoutExpired) as error:
        return Finding(name, "broken", str(error))


def _print(findings: list[Finding]) -> None:
    table = Table("check", "state", "detail", "what to do", "who")
    for one in findings:
        table.add_row(one.check, f"[{_COLOURS[one.state]}]{one.state}", one.detail, one.todo, one.who)
    Console().print(table)


def _configuration(path: Path) -> str:
    from hpcrl.config import load_config
    from hpcrl.launch.preflight import check_inputs

    check_inputs(load_config(path))
    return f"{path}: model and tasks are well-formed"
