"""Rows of the doctor's table: what was asked, what was found, and the same check asked on several nodes as one row. Pure."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpcrl.cli.doctor_checks import Fault
from hpcrl.errors import HpcrlError

__all__ = ["Finding", "asked", "merged"]

_ORDER = ("ok", "slow", "broken")
_FAMILY = 3
"""So many nodes are named; of more, the number."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One row. ``who``: user or admin; empty where nothing is to be done."""

    check: str
    state: str
    detail: str
    todo: str = ""
    who: str = ""


def asked(name: str, check: Callable[[], str]) -> Finding:
    """Make one check; whatever it finds is a row."""
    try:
        return Finding(name, "ok", check())
    except Fault as fault:
        return Finding(name, "slow" if fault.slow else "broken", fault.cause, fault.todo, fault.who)
    except (HpcrlError, OSError, ValueError, subprocess.TimeoutExpired) as error:
        return Finding(name, "broken", " ".join(str(error).split()))


def merged(by_node: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """One row per check, in the order of the first node: the worst that a node found, and which nodes found it.

    >>> merged({"cpu1": [Finding("disk", "ok", "7 GiB free")], "cpu2": [Finding("disk", "broken", "0 GiB free", "free some", "user")]})
    [Finding(check='disk', state='broken', detail='cpu2: 0 GiB free', todo='free some', who='user')]
    """
    rows: dict[str, list[tuple[str, Finding]]] = {}
    for node, findings in by_node.items():
        for finding in findings:
            rows.setdefault(finding.check, []).append((node, finding))
    found = []
    for check, each in rows.items():
        worst = max((finding.state for _, finding in each), key=_ORDER.index)
        same = [(node, finding) for node, finding in each if finding.state == worst]
        first = same[0][1]
        nodes = (
            [node for node, finding in same if finding.detail == first.detail]
            if worst == "ok"
            else [n for n, _ in same]
        )
        named = ", ".join(nodes) if len(nodes) <= _FAMILY else f"{nodes[0]} and {len(nodes) - 1} more nodes"
        found.append(Finding(check, worst, f"{named}: {first.detail}", first.todo, first.who))
    return found
