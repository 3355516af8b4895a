"""The private part of a task: its tests, its solution, and what task.toml says about the verifier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpcrl.errors import UserError
from hpcrl.sandbox.digests import combine, tree_digest
from hpcrl.sandbox.tasks import Task, load_task, read_toml, value_of, variables_of

__all__ = ["PrivateTask", "load_private"]

_DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PrivateTask:
    """``verifier_version``: digest of tests/ and of the verifier's settings. ``solution``: the reference script, if there is one, and
    ``solution_env`` what it is given."""

    public: Task
    tests: Path
    timeout_s: float
    env: dict[str, str]
    verifier_version: str
    solution: Path | None
    solution_env: dict[str, str]


def load_private(directory: Path) -> PrivateTask:
    """Read a task for scoring. Raises UserError naming the file and key that cannot be used."""
    public = load_task(directory)
    where = public.directory / "task.toml"
    table = read_toml(where)
    timeout = value_of(table, "verifier", "timeout_sec", (int, float), where)
    if timeout is not None and not 0 < timeout < float("inf"):
        raise UserError(f"{where}: [verifier] timeout_sec is {timeout!r}; it must be a positive number")
    env = variables_of(table, "verifier", where)
    tests = public.directory / "tests"
    if not (tests / "test.sh").is_file():
        raise UserError(f"{tests / 'test.sh'} does not exist; a Harbor task needs it to be scored")
    solution = public.directory / "solution" / "solve.sh"
    settings = "\n".join(f"{name}={value}" for name, value in sorted(env.items()))
    return PrivateTask(
        public=public,
        tests=tests,
        timeout_s=float(timeout) if timeout is not None else _DEFAULT_TIMEOUT_S,
        env=env,
        verifier_version=combine(tree_digest(tests), settings),
        solution=solution if solution.is_file() else None,
        solution_env=variables_of(table, "solution", where),
    )
