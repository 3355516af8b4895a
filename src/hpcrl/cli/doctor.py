"""``hpcrl doctor``: what of this machine and its Slurm works: ok, slow or broken, the cause, what to do, who can do it."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hpcrl.cli import doctor_checks as checks
from hpcrl.cli.doctor_job import Place, job_findings
from hpcrl.cli.doctor_table import Finding, asked

__all__ = ["doctor"]

_COLOURS = {"ok": "green", "slow": "yellow", "broken": "red"}

CHECKS: dict[str, Callable[[], str]] = {
    "Slurm": checks.slurm_answers,
    "PMI": checks.pmi_plugin,
    "Slurm settings": checks.slurm_settings,
    **checks.here,
}
"""Name → check, made where the doctor is called; the others are made by a step and a job of Slurm (doctor_job.py)."""


def doctor(
    config: Path | None, partitions: list[str] | None = None, as_json: bool = False, nodes: int = 2, job: bool = True
) -> bool:
    """Print the table; True when nothing is broken.

    ``partitions``: those of trainer, inference and sandboxes, in this order (None: the default one). ``job``: a short job on up to
    ``nodes`` nodes of each.
    """
    places: list[str | None] = [*partitions] if partitions else [None]
    chosen: dict[str, Callable[[], str]] = dict(CHECKS)
    if config is not None:
        chosen["configuration"] = lambda: _configuration(config)
    slurm = asked("Slurm", chosen.pop("Slurm")) if "Slurm" in chosen else None
    usable = slurm is not None and slurm.state == "ok"
    if usable:
        for partition in places:
            name = f" of {partition}" if partition else ""
            chosen[f"nodes{name}"] = partial(checks.nodes_are_up, partition)
            chosen[f"a step on a node{name}"] = partial(checks.on_nodes, partition)
    else:
        chosen = {name: check for name, check in chosen.items() if not name.startswith(_NEEDS_SLURM)}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        rows = list(pool.map(asked, chosen, chosen.values()))
    findings = [*([slurm] if slurm else []), *rows]
    broken = {one.check.split(" of ")[0] for one in findings if one.state == "broken"}
    if usable and job and not broken & _NEEDED_BY_JOB:
        findings += job_findings([Place(name, checks.usable_nodes(name, nodes)) for name in places], config)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        _print(findings)
    return all(finding.state != "broken" for finding in findings)


_NEEDS_SLURM = ("PMI", "Slurm settings")
_NEEDED_BY_JOB = {"PMI", "nodes", "a step on a node", "run directory", "configuration"}
_AT_ONCE = 4


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
