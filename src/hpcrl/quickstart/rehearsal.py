"""Plays repair episodes without sandbox or server, to measure a policy while it is being made.

Only commands of two kinds are emulated: those whose output is known, and ``sed -i '...' sol.py``, run by the real
``sed`` on text, in its own sandbox mode. What a real sandbox does with any other command does not matter: it earns nothing.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcrl.quickstart import dialogue
from hpcrl.quickstart.check import passes
from hpcrl.quickstart.demonstrations import LOOK, UNHELPFUL
from hpcrl.quickstart.families import Problem

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

__all__ = ["Episode", "play", "run_command", "sample"]

FIRST_REPLY_TOKENS = 32
SECOND_REPLY_TOKENS = 64
_SED = re.compile(r"\Ased -i '([^']*)' sol\.py\Z")


@dataclass(frozen=True, slots=True)
class Episode:
    """The command of each turn (None: the reply held none) and whether the file passes its check at the end."""

    problem: Problem
    first: str | None
    second: str | None
    success: bool


def run_command(command: str, source: str) -> tuple[str, str]:
    """``(output, new content of sol.py)`` of a shell command run where ``sol.py`` holds ``source``."""
    if command == LOOK:
        return source, source
    if command in UNHELPFUL:
        return UNHELPFUL[command], source
    match = _SED.match(command)
    if match is None:
        return "sh: not found\n", source
    done = subprocess.run(
        ["sed", "--sandbox", "-e", match.group(1)],
        input=source.encode(),
        capture_output=True,
        timeout=5,
        check=False,
    )
    if done.returncode != 0:
        return done.stderr.decode("utf-8", "replace"), source
    return "", done.stdout.decode("utf-8", "replace")


def play(model: Qwen3ForCausalLM, problems: Sequence[Problem], *, seed: int, temperature: float = 1.0) -> list[Episode]:
    """One two-turn episode per problem. ``temperature`` 0 is greedy."""
    prompts = [dialogue.opening(problem.instruction) for problem in problems]
    replies = sample(model, prompts, FIRST_REPLY_TOKENS, seed=2 * seed, temperature=temperature)
    firsts: list[str | None] = []
    sources: list[str] = []
    for index, (problem, reply) in enumerate(zip(problems, replies, strict=True)):
        command = _command(reply)
        output, source = ("", problem.source) if command is None else run_command(command, problem.source)
        firsts.append(command)
        sources.append(source)
        prompts[index] = [*prompts[index], *reply, *dialogue.observation(output)]
    replies = sample(model, prompts, SECOND_REPLY_TOKENS, seed=2 * seed + 1, temperature=temperature)
    episodes = []
    for problem, first, source, reply in zip(problems, firsts, sources, replies, strict=True):
        second = _command(reply)
        if second is not None:
            source = run_command(second, source)[1]
        success = passes(source, problem.function, problem.answers())
        episodes.append(Episode(problem, first, second, success))
    return episodes


def sample(
    model: Qwen3ForCausalLM, prompts: Sequence[list[int]], max_new_tokens: int, *, seed: int, temperature: float
) -> list[list[int]]:
    """One continuation per prompt, ended by ``IM_END`` (added if the length ran out). Left-padded, with a KV cache."""
    import torch
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(seed)
    width = max(len(prompt) for prompt in prompts)
    inputs = torch.full((len(prompts), width), dialogue.END_OF_TEXT)
    mask = torch.zeros((len(prompts), width), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        inputs[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    columns = []
    with torch.inference_mode():
        for _ in range(max_new_tokens):
            logits = model(
                input_ids=inputs,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            if temperature == 0:
                inputs = logits.argmax(-1, keepdim=True)
            else:
                inputs = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
            columns.append(torch.where(ended, dialogue.IM_END, inputs[:, 0]))
            ended |= inputs[:, 0] == dialogue.IM_END
            if bool(ended.all()):
                break
            positions = positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=torch.long)], 1)
    rows = torch.stack(columns, 1).tolist()
    return [_cut([*row, dialogue.IM_END]) for row in rows]


def _cut(reply: list[int]) -> list[int]:
    return reply[: reply.index(dialogue.IM_END) + 1]


def _command(reply: list[int]) -> str | None:
    return dialogue.parse_command(dialogue.decode(reply))
