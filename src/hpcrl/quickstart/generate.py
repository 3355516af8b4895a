"""Writes the repair task set as Harbor task directories.

    python -m hpcrl.quickstart.generate --out tasks/repair --seed 0

    OUT/train/repair-train-0000/    task.toml  instruction.md                       512 tasks of split train
    OUT/eval/repair-eval-0000/      environment/Dockerfile  environment/files/      96 held-out tasks, every fourth
                                    tests/test.sh  check.py  cases.txt              of split combo, else ident
                                    solution/solve.sh

Equal seeds give byte-equal trees. ``environment/files/`` is what the agent finds in its working directory.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from pathlib import Path

from hpcrl.errors import HpcrlError, UserError
from hpcrl.quickstart import check
from hpcrl.quickstart.families import Problem, Split, draw

__all__ = ["EVAL_TASKS", "TRAIN_TASKS", "eval_problems", "task_files", "train_problems", "write_tasks"]

TRAIN_TASKS = 512
EVAL_TASKS = 96

_TASK_TOML = """\
version = "1.0"

[metadata]
family = "{family}"
split = "{split}"

[agent]
timeout_sec = 60.0

[verifier]
timeout_sec = 30.0

[environment]
build_timeout_sec = 600.0
workdir = "/work"
cpus = 1
memory_mb = 512
storage_mb = 64
allow_internet = false
"""

_DOCKERFILE = """\
FROM python:3.12-slim
WORKDIR /work
COPY files/ /work/
"""

_TEST_SH = """\
#!/bin/sh
exec python3 -I -S /tests/check.py /tests/cases.txt /work/sol.py /logs/verifier/reward.txt
"""


def train_problems(seed: int, count: int = TRAIN_TASKS) -> list[Problem]:
    """``count`` different problems of split ``train``."""
    return _distinct(random.Random(f"repair/{seed}/train"), ["train"] * count)


def eval_problems(seed: int, count: int = EVAL_TASKS) -> list[Problem]:
    """``count`` different held-out problems; every fourth is of split ``combo``, the others are ``ident``."""
    splits: list[Split] = ["combo" if index % 4 == 3 else "ident" for index in range(count)]
    return _distinct(random.Random(f"repair/{seed}/eval"), splits)


def task_files(problem: Problem) -> dict[str, str]:
    """Path inside the task directory → content."""
    return {
        "task.toml": _TASK_TOML.format(family=problem.family, split=problem.split),
        "instruction.md": problem.instruction + "\n",
        "environment/Dockerfile": _DOCKERFILE,
        "environment/files/sol.py": problem.source,
        "tests/test.sh": _TEST_SH,
        "tests/check.py": Path(check.__file__).read_text(encoding="utf-8"),
        "tests/cases.txt": f"{(problem.function, problem.answers())!r}\n",
        "solution/solve.sh": f"#!/bin/sh\n{problem.fix}\n",
    }


def write_tasks(
    out: Path, seed: int, *, train: int = TRAIN_TASKS, evaluation: int = EVAL_TASKS, force: bool = False
) -> None:
    """Write ``out/train`` and ``out/eval``.

    Raises:
        UserError: one of the two exists and ``force`` is false.
    """
    targets = {"train": train_problems(seed, train), "eval": eval_problems(seed, evaluation)}
    for name in targets:
        if (out / name).exists() and not force:
            raise UserError(f"{out / name} exists; choose another --out, or give --force to replace train/ and eval/")
    for name, problems in targets.items():
        beside = out / f"{name}.partial"
        shutil.rmtree(beside, ignore_errors=True)
        for index, problem in enumerate(problems):
            _write_task(beside / f"repair-{name}-{index:04d}", problem)
        if (out / name).exists():
            shutil.rmtree(out / name)
        beside.rename(out / name)


def _distinct(rng: random.Random, splits: list[Split]) -> list[Problem]:
    problems: dict[tuple[str, str], Problem] = {}
    for split in splits:
        while True:
            problem = draw(rng, split)
            if (problem.instruction, problem.source) not in problems:
                problems[problem.instruction, problem.source] = problem
                break
    return list(problems.values())


def _write_task(directory: Path, problem: Problem) -> None:
    for name, content in task_files(problem).items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        path.chmod(0o755 if path.suffix == ".sh" else 0o644)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hpcrl.quickstart.generate", description="Write the repair tasks.")
    parser.add_argument("--out", type=Path, default=Path("tasks/repair"), help="directory for train/ and eval/")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=TRAIN_TASKS, help="number of training tasks")
    parser.add_argument("--eval", type=int, default=EVAL_TASKS, help="number of held-out tasks")
    parser.add_argument("--force", action="store_true", help="replace train/ and eval/ if they exist")
    options = parser.parse_args(arguments)
    try:
        write_tasks(options.out, options.seed, train=options.train, evaluation=options.eval, force=options.force)
    except HpcrlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{options.train} training and {options.eval} held-out tasks in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
