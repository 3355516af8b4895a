"""Scripted episodes for the warm start.

A clean demonstration reads the file and applies the right fix. A flawed one may skip reading (and then guess), or read
and apply a wrong fix: imitating a mixture of them gives a start that often fails yet can already do everything the task
needs, so that there is something for reinforcement to find.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from hpcrl.quickstart import dialogue
from hpcrl.quickstart.families import Problem

__all__ = ["CLEAN", "LOOK", "UNHELPFUL", "Demonstration", "Flaws", "demonstrate"]

LOOK = "cat sol.py"
UNHELPFUL = {
    "ls": "sol.py\n",
    "pwd": "/work\n",
    "cat test.py": "cat: test.py: No such file or directory\n",
}
"""First commands that teach nothing, with the output a sandbox gives."""


@dataclass(frozen=True, slots=True)
class Flaws:
    """``blind``: share that does not read the file. ``careless``: share of the readers whose fix is drawn at random."""

    blind: float = 0.0
    careless: float = 0.0


CLEAN = Flaws()


@dataclass(frozen=True, slots=True)
class Demonstration:
    """``token_ids`` of a whole episode; ``is_reply[i]`` is True where token i is the assistant's own."""

    token_ids: list[int]
    is_reply: list[bool]


def demonstrate(problem: Problem, rng: random.Random, flaws: Flaws = CLEAN) -> Demonstration:
    """One scripted episode of ``problem``."""
    if rng.random() < flaws.blind:
        first = rng.choice(list(UNHELPFUL))
        output, second = UNHELPFUL[first], problem.blind_guess
    else:
        first, output = LOOK, problem.source
        careless = rng.random() < flaws.careless
        second = rng.choice((problem.fix, *problem.wrong_fixes)) if careless else problem.fix
    parts = (
        (dialogue.opening(problem.instruction), False),
        (dialogue.reply(first), True),
        (dialogue.observation(output), False),
        (dialogue.reply(second), True),
    )
    return Demonstration(
        token_ids=[token for tokens, _ in parts for token in tokens],
        is_reply=[own for tokens, own in parts for _ in tokens],
    )
