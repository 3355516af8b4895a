"""Measures a policy on the held-out problems and writes its model card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcrl.quickstart.demonstrations import LOOK
from hpcrl.quickstart.generate import eval_problems
from hpcrl.quickstart.rehearsal import Episode, play

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

__all__ = ["Measurement", "measure", "model_card"]

_TASK_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Shares in [0, 1] over ``episodes`` episodes at temperature 1, and the success of greedy decoding."""

    episodes: int
    success: float
    success_ident: float
    success_combo: float
    greedy_success: float
    looks_first: float
    valid_commands: float


def measure(model: Qwen3ForCausalLM, repeats: int = 4) -> Measurement:
    """Play the held-out problems of the committed task set ``repeats`` times, without sandboxes."""
    problems = eval_problems(_TASK_SEED)
    episodes = [episode for seed in range(repeats) for episode in play(model, problems, seed=seed)]
    greedy = play(model, problems, seed=0, temperature=0.0)
    return Measurement(
        episodes=len(episodes),
        success=_share(episodes, lambda episode: episode.success),
        success_ident=_share([e for e in episodes if e.problem.split == "ident"], lambda episode: episode.success),
        success_combo=_share([e for e in episodes if e.problem.split == "combo"], lambda episode: episode.success),
        greedy_success=_share(greedy, lambda episode: episode.success),
        looks_first=_share(episodes, lambda episode: episode.first == LOOK),
        valid_commands=_share(episodes, lambda episode: episode.first is not None and episode.second is not None),
    )


def model_card(model: Qwen3ForCausalLM, measured: Measurement, seed: int) -> str:
    """The README.md of the model directory."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"""\
# repair-qwen3

A Qwen3 of {parameters:,} parameters over bytes, float32: the start of the quickstart's reinforcement learning on
`tasks/repair`. It is useless for anything else.

Made by the stages of `python -m hpcrl.quickstart.warmstart --seed {seed}` (minutes on two idle cores): supervised training
on scripted episodes of the training split, clean ones first, flawed ones at the end. No name and no pair of bug and fix
that is held out for evaluation occurs in them. Weights and numbers differ a little between machines and thread counts.

Measured on the {measured.episodes} episodes of four rounds of `tasks/repair/eval`, temperature 1, no sandbox:

| | |
|---|---|
| success | {measured.success:.3f} |
| success, new names only (`ident`) | {measured.success_ident:.3f} |
| success, new names and new pairs (`combo`) | {measured.success_combo:.3f} |
| success, greedy (the skill is there; the habit is not) | {measured.greedy_success:.3f} |
| reads the file first | {measured.looks_first:.3f} |
| both replies are one valid command block | {measured.valid_commands:.3f} |

Tokenizer: id of byte b is b; `<|im_start|>` 256, `<|im_end|>` 257 (end of turn), `<|endoftext|>` 258 (padding).
"""


def _share(episodes: list[Episode], holds: Callable[[Episode], bool]) -> float:
    return sum(map(holds, episodes)) / max(1, len(episodes))
