"""Families of tiny repair problems: one function, one bug, one ``sed`` that mends it.

A problem is drawn from a family (operator, comparison, builtin, index, range end), a pair of its keys
(the right one and the wrong one that stands in the file) and random short names. Three splits never share a name:

    train   names whose checksum says so; pairs that are not held out
    ident   held-out names, the same pairs          (does the skill carry over to new files?)
    combo   held-out names and held-out pairs       (does it carry over to confusions never seen?)

Pure: everything follows from the ``random.Random`` passed in.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["FAMILIES", "SPLITS", "Case", "Family", "Problem", "Split", "draw", "is_held_out_name", "sed"]

Split = Literal["train", "ident", "combo"]
SPLITS: tuple[Split, ...] = ("train", "ident", "combo")
Case = tuple[Any, ...]
"""The arguments of one call, e.g. ``(7, 3)`` or ``([4, 1, 9],)``."""

_CONSONANTS = "bdfghjklmnprstvwz"
_VOWELS = "aeiou"
_SHORT_SHAPES = ("CV", "VC", "CVC", "CVC")
_FUNCTION_SHAPE = "CVCV"
# A name that contains one of these could be hit by the sed that is meant for the expression.
_RESERVED = (
    *("def", "del", "for", "if", "in", "is", "or", "and", "not", "as", "abs", "return", "range"),
    *("min", "max", "sum", "len", "sorted"),
)
_HELD_OUT_SHARE = 5  # one name in five is held out


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of bug.

    ``phrases`` maps each key (the text that may stand in the file) to the English for it; ``expression`` is the
    returned expression around key ``{k}``, over arguments ``{a}`` and, if ``arity`` is 2, ``{b}``; ``pattern`` is the
    piece of it that the sed command matches. ``held_out`` are the (right, wrong) pairs that only split ``combo`` uses.
    """

    name: str
    arity: int
    expression: str
    phrases: dict[str, tuple[str, ...]]
    cases: tuple[Case, ...]
    pattern: str = "{k}"
    held_out: frozenset[tuple[str, str]] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One repair problem. ``source`` is the file with the bug, ``reference`` the file without it.

    ``fix`` is the right command, ``wrong_fixes`` the same command with every other key of the family, ``blind_guess``
    what someone who has not read the file might try. ``cases`` tell ``reference`` from all wrong fixes.
    """

    family: str
    split: Split
    function: str
    instruction: str
    source: str
    reference: str
    fix: str
    wrong_fixes: tuple[str, ...]
    blind_guess: str
    cases: tuple[Case, ...]

    def answers(self) -> list[tuple[Case, Any]]:
        """``(arguments, result of the reference)`` for each case."""
        namespace: dict[str, Any] = {}
        exec(self.reference, namespace)
        return [(case, namespace[self.function](*case)) for case in self.cases]


_PAIRS: tuple[Case, ...] = ((7, 3), (20, 6), (4, 9), (30, 7))
_LISTS: tuple[Case, ...] = (([4, 1, 9, 5],), ([7, 2, 3],), ([5, 8, 3, 1, 2],))

FAMILIES: tuple[Family, ...] = (
    Family(
        name="operator",
        arity=2,
        expression="{a} {k} {b}",
        phrases={
            "+": ("{a} plus {b}", "the sum of {a} and {b}"),
            "-": ("{a} minus {b}", "{b} taken from {a}"),
            "*": ("{a} times {b}", "the product of {a} and {b}"),
            "//": ("{a} divided by {b}, rounded down", "the whole quotient of {a} by {b}"),
            "%": ("{a} modulo {b}", "the remainder of {a} by {b}"),
        },
        cases=_PAIRS,
        held_out=frozenset({("*", "+"), ("//", "-")}),
    ),
    Family(
        name="comparison",
        arity=2,
        expression="{a} {k} {b}",
        phrases={
            "<": ("whether {a} is less than {b}", "whether {a} is below {b}"),
            "<=": ("whether {a} is at most {b}", "whether {a} is no more than {b}"),
            ">": ("whether {a} is greater than {b}", "whether {a} is above {b}"),
            ">=": ("whether {a} is at least {b}", "whether {a} is no less than {b}"),
            "==": ("whether {a} equals {b}", "whether {a} is the same as {b}"),
            "!=": ("whether {a} differs from {b}", "whether {a} is not equal to {b}"),
        },
        cases=((1, 2), (2, 2), (3, 2)),
        held_out=frozenset({(">", "<="), ("==", "<"), ("!=", ">=")}),
    ),
    Family(
        name="builtin",
        arity=1,
        expression="{k}({a})",
        phrases={
            "sum": ("the total of {a}", "the sum of all {a}"),
            "max": ("the largest of {a}", "the biggest in {a}"),
            "min": ("the smallest of {a}", "the least in {a}"),
            "len": ("the size of {a}", "how many are in {a}"),
            "sorted": ("{a} in rising order", "{a} in order"),
        },
        cases=(([4, 1, 9, 4],), ([7, 2],), ([5, 8, 3, 1, 2],)),
        held_out=frozenset({("min", "sum"), ("len", "max")}),
    ),
    Family(
        name="index",
        arity=1,
        expression="{a}[{k}]",
        phrases={
            "0": ("the first of {a}",),
            "1": ("the second of {a}",),
            "-1": ("the last of {a}",),
            "-2": ("the last but one of {a}",),
        },
        cases=_LISTS,
    ),
    Family(
        name="range",
        arity=1,
        expression="sum(range({k}))",
        phrases={
            "{a}": ("the sum of the numbers below {a}",),
            "{a} + 1": ("the sum of the numbers up to {a}",),
            "{a} - 1": ("the sum of the numbers below {a} less 1",),
        },
        cases=((3,), (6,), (10,)),
        pattern="nge({k})",
    ),
)


def is_held_out_name(name: str) -> bool:
    """True for the fifth of all names that training never sees."""
    return zlib.crc32(name.encode()) % _HELD_OUT_SHARE == 0


def sed(old: str, new: str) -> str:
    """The shell command that replaces the first ``old`` of each line of ``sol.py`` by ``new``."""
    return f"sed -i 's|{old}|{new}|' sol.py"


def draw(rng: random.Random, split: Split) -> Problem:
    """One random problem of ``split``. Equal ``rng`` states give equal problems."""
    while True:
        family = rng.choice(FAMILIES)
        right, wrong = rng.sample(list(family.phrases), 2)
        if ((right, wrong) in family.held_out) == (split == "combo"):
            return _problem(rng, split, family, right, wrong)


def _problem(rng: random.Random, split: Split, family: Family, right: str, wrong: str) -> Problem:
    taken: list[str] = []
    for shapes in ((_FUNCTION_SHAPE,), _SHORT_SHAPES, _SHORT_SHAPES, _SHORT_SHAPES):
        taken.append(_name(rng, shapes, taken, held_out=split != "train"))
    function, a, b, temporary = taken
    arguments = f"{a}, {b}" if family.arity == 2 else a
    use_temporary = rng.random() < 0.5

    def filled(template: str, key: str) -> str:
        return template.format(k=key.format(a=a), a=a, b=b)

    def file(key: str) -> str:
        expression = filled(family.expression, key)
        head = f"def {function}({arguments}):\n"
        if use_temporary:
            return f"{head}    {temporary} = {expression}\n    return {temporary}\n"
        return f"{head}    return {expression}\n"

    def command(old: str, new: str) -> str:
        return sed(filled(family.pattern, old), filled(family.pattern, new))

    keys = list(family.phrases)
    phrase = rng.choice(family.phrases[right]).format(a=a, b=b)
    return Problem(
        family=family.name,
        split=split,
        function=function,
        instruction=f"Make {function}({arguments}) return {phrase}.",
        source=file(wrong),
        reference=file(right),
        fix=command(wrong, right),
        wrong_fixes=tuple(command(wrong, key) for key in keys if key not in (right, wrong)),
        blind_guess=command(*rng.sample(keys, 2)),
        cases=family.cases + _extra_cases(rng, family),
    )


def _name(rng: random.Random, shapes: tuple[str, ...], taken: list[str], *, held_out: bool) -> str:
    while True:
        shape = rng.choice(shapes)
        name = "".join(rng.choice(_CONSONANTS if letter == "C" else _VOWELS) for letter in shape)
        if name not in taken and not any(word in name for word in _RESERVED) and is_held_out_name(name) == held_out:
            return name


def _extra_cases(rng: random.Random, family: Family) -> tuple[Case, ...]:
    """Two random calls, so that no file can answer by a table of the family's fixed cases."""
    if family.arity == 2:
        return tuple((rng.randint(1, 60), rng.randint(1, 12)) for _ in range(2))
    if family.name == "range":
        return tuple((rng.randint(4, 40),) for _ in range(2))
    return tuple(([rng.randint(1, 60) for _ in range(rng.randint(3, 6))],) for _ in range(2))
