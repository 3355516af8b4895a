"""The batch script of a heterogeneous job made of several callables. Pure: parameters → text."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import _make_sbatch_string

from hpcrl.launch.het_environment import COMPONENT

__all__ = ["LEADER_ONLY", "end_record", "het_script", "task_count"]

LEADER_ONLY = ("dependency", "mail_type", "mail_user")
"""Slurm takes these from the first component and refuses or ignores them elsewhere."""


def task_count(parameters: Mapping[str, Any]) -> int:
    """Tasks of one component."""
    return int(parameters.get("nodes", 1)) * max(1, int(parameters.get("ntasks_per_node") or 1))


def end_record(folder: Path, component: str) -> Path:
    """Where the batch script notes how a component (``44+1``) ended: a state in Slurm's words."""
    return folder / f"{component}_end"


def het_script(components: Sequence[Mapping[str, Any]], folder: Path, command: str) -> str:
    """``components``: one mapping of submitit's Slurm parameters each. Every component runs ``command`` as one step of its own.

    A component that fails leaves the others running; the job's exit code is the first one that is not 0.
    """
    blocks = [_directives(parameters, folder, first=index == 0) for index, parameters in enumerate(components)]
    steps = [_step(index, parameters, folder, command) for index, parameters in enumerate(components)]
    body = [
        "export SUBMITIT_EXECUTOR=hetslurm",
        "steps=()",
        *steps,
        "code=0",
        'for step in "${steps[@]}"; do',
        '  wait "$step" || { ended=$?; [ "$code" -ne 0 ] || code=$ended; }',
        "done",
        'exit "$code"',
    ]
    return "\n".join(["#!/bin/bash", "\n#SBATCH hetjob\n".join(blocks), "", *body, ""])


def _directives(parameters: Mapping[str, Any], folder: Path, *, first: bool) -> str:
    own = {key: value for key, value in parameters.items() if first or key not in LEADER_ONLY}
    text = _make_sbatch_string(command="", folder=folder, **own)
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    if not first:
        lines = [line for line in lines if not line.startswith(("#SBATCH --output", "#SBATCH --error"))]
    else:
        log = folder / "%j_batch.log"
        lines = [line for line in lines if not line.startswith(("#SBATCH --output", "#SBATCH --error"))]
        lines.append(f"#SBATCH --output={shlex.quote(str(log))}")
    return "\n".join(lines)


def _step(index: int, parameters: Mapping[str, Any], folder: Path, command: str) -> str:
    """One component in a subshell in the background. The batch script's own SLURM_* speak of component 0: sizes are given again."""
    component = f'"$SLURM_JOB_ID"+{index}'
    logs = [f"--output={_path(folder, component, '%t_log.out')}"]
    if not parameters.get("stderr_to_stdout"):
        logs.append(f"--error={_path(folder, component, '%t_log.err')}")
    options = [f"--nodes={parameters.get('nodes', 1)}", f"--ntasks={task_count(parameters)}"]
    if parameters.get("cpus_per_task"):
        options.append(f"--cpus-per-task={parameters['cpus_per_task']}")
    srun = [
        "srun",
        f"--het-group={index}",
        "--unbuffered",
        "--open-mode=append",
        "--kill-on-bad-exit=1",
        *options,
        *logs,
    ]
    more = [shlex.quote(str(arg)) for arg in parameters.get("srun_args") or ()]
    return "\n".join(
        [
            "(",
            "state=",
            "trap 'state=CANCELLED' TERM",
            *(parameters.get("setup") or ()),
            f"export {COMPONENT}={component}",
            " ".join([*srun, *more, command]),
            "ended=$?",
            'if [ -z "$state" ]; then [ "$ended" -eq 0 ] && state=COMPLETED || state=FAILED; fi',
            f'echo "$state" > {_path(folder, component, "end")}',
            *(parameters.get("teardown") or ()),
            'exit "$ended"',
            ") & steps+=($!)",
        ]
    )


def _path(folder: Path, component: str, name: str) -> str:
    return f"{shlex.quote(str(folder) + '/')}{component}_{name}"
