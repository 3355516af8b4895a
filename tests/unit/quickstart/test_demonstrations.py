from __future__ import annotations

import random

from hpcrl.quickstart import dialogue
from hpcrl.quickstart.demonstrations import LOOK, UNHELPFUL, Demonstration, Flaws, demonstrate
from hpcrl.quickstart.families import Problem, draw
from hpcrl.quickstart.rehearsal import run_command


def commands(demo: Demonstration) -> list[str | None]:
    """The command of each run of reply tokens."""
    replies: list[list[int]] = []
    previous = False
    for token, own in zip(demo.token_ids, demo.is_reply, strict=True):
        if own and not previous:
            replies.append([])
        if own:
            replies[-1].append(token)
        previous = own
    assert all(reply[-1] == dialogue.IM_END for reply in replies)
    return [dialogue.parse_command(dialogue.decode(reply)) for reply in replies]


def problem(seed: int) -> Problem:
    return draw(random.Random(seed), "train")


def test_clean_demonstration_looks_and_mends() -> None:
    for seed in range(30):
        demo = demonstrate(problem(seed), random.Random(seed))
        assert commands(demo) == [LOOK, problem(seed).fix]
        assert problem(seed).source in dialogue.decode(demo.token_ids)
        assert len(demo.token_ids) < 256


def test_blind_demonstration_never_shows_the_file() -> None:
    for seed in range(30):
        demo = demonstrate(problem(seed), random.Random(seed), Flaws(blind=1.0))
        first, second = commands(demo)
        assert first in UNHELPFUL and second == problem(seed).blind_guess
        assert problem(seed).source not in dialogue.decode(demo.token_ids)


def test_careless_demonstration_is_sometimes_wrong() -> None:
    seconds = [commands(demonstrate(problem(s), random.Random(s), Flaws(careless=1.0)))[1] for s in range(40)]
    wrong = sum(second != problem(seed).fix for seed, second in enumerate(seconds))
    assert 10 < wrong < 40


def test_outputs_shown_are_those_of_the_emulated_shell() -> None:
    for command, output in UNHELPFUL.items():
        assert run_command(command, "x = 1\n") == (output, "x = 1\n")
