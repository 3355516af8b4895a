from __future__ import annotations

import random
import re

import pytest

from hpcrl.quickstart.check import passes
from hpcrl.quickstart.families import FAMILIES, SPLITS, Problem, Split, draw, is_held_out_name
from hpcrl.quickstart.rehearsal import run_command


def problems(split: Split, count: int = 60, seed: int = 5) -> list[Problem]:
    rng = random.Random(seed)
    return [draw(rng, split) for _ in range(count)]


def names(problem: Problem) -> set[str]:
    """The random names of the file: function, arguments, temporary."""
    words = set(re.findall(r"[a-z]+", problem.source))
    return words - {"def", "return", "sum", "max", "min", "len", "sorted", "range"}


@pytest.mark.parametrize("split", SPLITS)
def test_only_the_right_fix_passes(split: Split) -> None:
    for problem in problems(split):
        cases = problem.answers()

        def outcome(command: str, problem: Problem = problem, cases: list = cases) -> bool:
            return passes(run_command(command, problem.source)[1], problem.function, cases)

        assert passes(problem.reference, problem.function, cases)
        assert not passes(problem.source, problem.function, cases)
        assert outcome(problem.fix)
        assert not any(outcome(wrong) for wrong in problem.wrong_fixes)


def test_splits_share_no_name() -> None:
    train = set().union(*(names(p) for p in problems("train", 300)))
    held = set().union(*(names(p) for split in ("ident", "combo") for p in problems(split, 150)))  # type: ignore[arg-type]
    assert train and held and not train & held
    assert not any(map(is_held_out_name, train)) and all(map(is_held_out_name, held))


def test_held_out_pairs_occur_in_combo_only() -> None:
    def pairs(split: Split) -> set[tuple[str, str]]:
        """(family, fix) with the names taken out."""
        return {(p.family, p.fix) for p in problems(split, 400) if p.family != "range"}

    assert not pairs("train") & pairs("combo")
    assert not pairs("ident") & pairs("combo")
    assert {p.family for p in problems("combo")} == {family.name for family in FAMILIES if family.held_out}
    assert {p.family for p in problems("train")} == {family.name for family in FAMILIES}


def test_equal_seeds_give_equal_problems() -> None:
    assert problems("train", seed=1) == problems("train", seed=1)
    assert problems("train", seed=1) != problems("train", seed=2)


def test_the_file_does_not_contain_the_answer() -> None:
    for problem in problems("train"):
        assert problem.source != problem.reference
        assert problem.fix not in problem.wrong_fixes
        assert problem.function in problem.instruction and problem.function in problem.source
