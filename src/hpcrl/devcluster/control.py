"""Questions and orders to a running slurmctld, through Slurm's own commands."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress

from hpcrl.devcluster.procs import run_tool, wait_for
from hpcrl.errors import EnvironmentFault

_USABLE = {"idle", "mixed", "allocated", "completing", "planned"}
"""``planned``: idle, and meant for a job that waits for other nodes too."""


def usable(state: str) -> bool:
    """True for a node state that takes jobs. Example: ``usable("idle")``; ``idle*`` does not respond and is not."""
    return state in _USABLE


def to_resume(state: str) -> bool:
    """True for a node state that only ``state=resume`` ends. Example: ``drained*``, ``down``, ``fail``."""
    return re.match(r"(down|drain|fail|inval)", state) is not None


def parse_nodes(text: str) -> dict[str, str]:
    """Node name to state, from ``sinfo -h -N -o "%N %T"``; a node is listed once per partition."""
    return {name: state for name, _, state in (line.partition(" ") for line in text.splitlines()) if state}


def node_states(env: dict[str, str]) -> dict[str, str]:
    """Node name to long state, as sinfo shows it."""
    return parse_nodes(run_tool(["sinfo", "-h", "-N", "-o", "%N %T"], env=env))


def reconfigure(env: dict[str, str]) -> None:
    """Make the daemons read a changed slurm.conf (another version of this program wrote the old one)."""
    run_tool(["scontrol", "reconfigure"], env=env)


def jobs(env: dict[str, str]) -> list[str]:
    """Ids of all jobs not yet ended (raw ids: each component of a het job has its own)."""
    return run_tool(["squeue", "-h", "-o", "%A"], env=env).split()


def cancel_all(env: dict[str, str], *, patience_s: float) -> None:
    """Cancel every job and wait up to ``patience_s`` seconds for their ends."""
    found = jobs(env)
    if found:
        run_tool(["scancel", "--quiet", *found], env=env)
        wait_for(lambda: not jobs(env), timeout_s=patience_s, poll_s=0.2)


def await_nodes(
    env: dict[str, str],
    names: Iterable[str],
    *,
    timeout_s: float,
    progress: Callable[[str], None],
    lost: Callable[[str], str],
) -> None:
    """Wait until all nodes take jobs, resuming those that are down or drained.

    Raises EnvironmentFault after ``timeout_s``, with ``lost(node)`` as the reason.
    """
    wanted = list(names)
    ready: set[str] = set()
    states: dict[str, str] = {}

    def all_ready() -> bool:
        states.update(node_states(env))
        for name in wanted:
            state = states.get(name, "absent")
            if usable(state) and name not in ready:
                ready.add(name)
                progress(f"node {name}: {state}")
            elif to_resume(state):
                ready.discard(name)
                with suppress(EnvironmentFault):  # "Invalid node state" while a resume is under way
                    run_tool(["scontrol", "update", f"nodename={name}", "state=resume"], env=env)
        return all(usable(states.get(name, "")) for name in wanted)

    if not wait_for(all_ready, timeout_s=timeout_s, poll_s=0.2):
        bad = next(name for name in wanted if not usable(states.get(name, "")))
        raise EnvironmentFault(f"node {bad} is {states.get(bad, 'absent')} after {timeout_s:.0f} s: {lost(bad)}")
