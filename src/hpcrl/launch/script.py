"""The sbatch text of one run: slurm/launch_hetjob.sh with this run's arguments and options written into it. Pure.

The site's own copy of the script decides everything else: partitions, sizes, modules. So the text does what
``sbatch OPTIONS slurm/launch_hetjob.sh ARGUMENTS`` does.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from hpcrl.errors import UserError

__all__ = ["after_option", "run_script"]

_COMPONENT = "#SBATCH hetjob"


def run_script(script: str, arguments: Sequence[str], options: Sequence[str] = ()) -> str:
    """``options`` are sbatch's, ``:`` between components, as on its command line. Raises UserError."""
    lines = script.splitlines()
    last = max((at for at, line in enumerate(lines) if line.startswith("#SBATCH")), default=None)
    if last is None:
        raise UserError("the script has no #SBATCH lines; start from slurm/launch_hetjob.sh")
    blocks = [list(block) for block in _blocks(lines[: last + 1])]
    parts = _parts(options)
    if len(parts) > len(blocks):
        raise UserError(f"sbatch options for {len(parts)} components, but the script has {len(blocks)}")
    for block, extra in zip(blocks, parts, strict=False):
        block += [f"#SBATCH {option}" for option in extra]  # the last one counts
    head = f"\n{_COMPONENT}\n".join("\n".join(block) for block in blocks)
    return "\n".join([head, "", f"set -- {shlex.join(arguments)}", *lines[last + 1 :], ""])


def after_option(job_id: str | int) -> str:
    """sbatch's option to start once ``job_id`` has ended, however it ended. Raises UserError."""
    leader = str(job_id).removesuffix("+0")
    if not leader.isdigit():
        raise UserError(
            f"--after {job_id}: expected the id of a job, for example 44 (of a heterogeneous job: its leader's)"
        )
    return f"--dependency=afterany:{leader}"


def _blocks(lines: list[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip() == _COMPONENT:
            found.append([])
        else:
            found[-1].append(line)
    return found


def _parts(options: Sequence[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for option in options:
        if option == ":":
            found.append([])
        elif option.startswith("--") and "\n" not in option:
            found[-1].append(option)
        else:
            raise UserError(f"sbatch option {option!r}: write --name=value, and : between components")
    return found
