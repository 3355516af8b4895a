from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch

from hpcrl.quickstart import dialogue, rehearsal
from hpcrl.quickstart.families import draw
from hpcrl.quickstart.model import new_model

SOURCE = "def f(a, b):\n    return a * b\n"


def test_commands_of_the_emulated_shell() -> None:
    assert rehearsal.run_command("cat sol.py", SOURCE) == (SOURCE, SOURCE)
    assert rehearsal.run_command("sed -i 's|*|%|' sol.py", SOURCE) == ("", SOURCE.replace("*", "%"))
    assert rehearsal.run_command("rm sol.py", SOURCE)[1] == SOURCE
    output, after = rehearsal.run_command("sed -i 's|*|%' sol.py", SOURCE)
    assert "unterminated" in output and after == SOURCE


def test_sed_cannot_run_commands_or_write_files() -> None:
    for script in ("1e touch x", "1w /tmp/hpcrl-sed"):
        output, after = rehearsal.run_command(f"sed -i '{script}' sol.py", SOURCE)
        assert "sandbox" in output and after == SOURCE


class Scripted:
    """A model that answers prompt i with ``replies[turn][i]``, whatever the temperature."""

    def __init__(self, turns: list[list[list[int]]]) -> None:
        self.config = new_model(0).config
        self.turns = turns
        self.turn, self.column = -1, 0

    def __call__(self, *, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        if input_ids.shape[1] > 1:
            self.turn, self.column = self.turn + 1, 0
        logits = torch.full((len(input_ids), 1, dialogue.VOCABULARY_SIZE), -1e9)
        for row, reply in enumerate(self.turns[self.turn]):
            logits[row, 0, reply[min(self.column, len(reply) - 1)]] = 0.0
        self.column += 1
        return SimpleNamespace(logits=logits)


def test_play_scores_each_episode_by_its_own_commands() -> None:
    rng = random.Random(3)
    right, wrong, blind = (draw(rng, "train") for _ in range(3))
    first = [dialogue.reply("cat sol.py"), dialogue.reply("cat sol.py"), dialogue.encode("no command") * 9]
    second = [dialogue.reply(right.fix), dialogue.reply(wrong.wrong_fixes[0]), dialogue.reply(blind.fix)]
    episodes = rehearsal.play(Scripted([first, second]), [right, wrong, blind], seed=0)  # type: ignore[arg-type]
    assert [episode.success for episode in episodes] == [True, False, True]
    assert [episode.first for episode in episodes] == ["cat sol.py", "cat sol.py", None]
    assert [episode.second for episode in episodes] == [right.fix, wrong.wrong_fixes[0], blind.fix]


def test_batched_cached_sampling_equals_plain_greedy_decoding() -> None:
    model = new_model(1).eval()
    prompts = [dialogue.opening("short"), dialogue.opening("a rather longer instruction")]
    replies = rehearsal.sample(model, prompts, 6, seed=0, temperature=0.0)
    for prompt, reply in zip(prompts, replies, strict=True):
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(6):
                tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        assert reply[:-1] == tokens[len(prompt) :][: len(reply) - 1]
