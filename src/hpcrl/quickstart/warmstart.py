"""Makes the quickstart's policy: a model that knows the dialogue and the skill, yet mostly fails.

    python -m hpcrl.quickstart.warmstart --out models/repair-qwen3 --seed 0

Supervised training on scripted episodes of split ``train`` in four stages:

    skill    clean demonstrations from scratch
    polish   clean demonstrations again, fresh learning-rate schedule (success 0.99)
    widen    some demonstrations do not read the file: the model learns to write those episodes too
    spoil    most do not read the file, some apply a wrong fix: the bad habit, in few and gentle steps

The result acts badly by habit, not for lack of skill. Noise from the first step on, a short skill stage or a rough last
stage give models that reinforcement lifts slowly or not at all. Muon on the matrices matters: AdamW alone needs several
times as long.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.errors import UserError
from hpcrl.quickstart.demonstrations import CLEAN, Demonstration, Flaws, demonstrate
from hpcrl.quickstart.dialogue import END_OF_TEXT, IM_END, VOCABULARY_SIZE
from hpcrl.quickstart.families import draw
from hpcrl.quickstart.model import new_model
from hpcrl.quickstart.model_card import measure, model_card
from hpcrl.quickstart.tokenizer import build_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import Qwen3ForCausalLM

__all__ = ["STAGES", "Stage", "save", "train", "warm_start"]

BATCH_SIZE = 16
PROMPT_LOSS_WEIGHT = 0.5  # predicting instruction and file too teaches copying
RAMP_STEPS = 40
DECAY_SHARE = 0.3
FINAL_RATE_SHARE = 0.05
GENTLE_RATE = 5e-4


@dataclass(frozen=True, slots=True)
class Stage:
    """``steps`` optimiser steps on demonstrations with ``flaws``.

    The learning rates ramp up and decay within the stage; ``rate`` scales them. ``gentle`` uses AdamW alone, which changes
    habits and leaves skill in place; Muon moves every direction of a matrix alike and would wear it down.
    """

    name: str
    steps: int
    flaws: Flaws = CLEAN
    rate: float = 1.0
    gentle: bool = False


STAGES = (
    Stage("skill", 650),
    Stage("polish", 400),
    Stage("widen", 120, Flaws(blind=0.3), rate=0.5),
    Stage("spoil", 40, Flaws(blind=0.6, careless=0.05), gentle=True),
)


def warm_start(seed: int, stages: tuple[Stage, ...] = STAGES) -> Qwen3ForCausalLM:
    """A new model taken through ``stages``; minutes of CPU time."""
    model = new_model(seed)
    for index, stage in enumerate(stages):
        train(model, stage, random.Random(f"{seed}/{index}/{stage.name}"))
    return model.eval()


def train(model: Qwen3ForCausalLM, stage: Stage, rng: random.Random) -> None:
    """Run one stage in place, with new optimisers."""
    import torch

    optimizers = _optimizers(model, stage.gentle)
    base_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    started = time.monotonic()
    model.train()
    for step in range(1, stage.steps + 1):
        share = stage.rate * _rate_share(step, stage.steps)
        for optimizer, rates in zip(optimizers, base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * share
        batch = [demonstrate(draw(rng, "train"), rng, stage.flaws) for _ in range(BATCH_SIZE)]
        loss, reply_loss = _loss(model, batch)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if step % 50 == 0 or step == stage.steps:
            seconds = time.monotonic() - started
            print(f"{stage.name} {step}/{stage.steps} reply loss {reply_loss:.4f} {seconds:.0f} s", flush=True)
    model.eval()


def _rate_share(step: int, steps: int) -> float:
    """The learning rate's share of its base at ``step`` (from 1): linear ramp, plateau, linear decay."""
    decay = (1 - step / steps) / DECAY_SHARE * (1 - FINAL_RATE_SHARE) + FINAL_RATE_SHARE
    return min(1.0, step / RAMP_STEPS) * min(1.0, decay)


def _optimizers(model: Qwen3ForCausalLM, gentle: bool) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embedding and norms; if ``gentle``, slow Adam for all."""
    import torch

    if gentle:
        return [torch.optim.AdamW(model.parameters(), lr=GENTLE_RATE, betas=(0.9, 0.98), weight_decay=0.0)]

    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    embeddings = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" in name]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": embeddings, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01, momentum=0.95, adjust_lr_fn="original"),
        torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.98)),
    ]


def _loss(model: Qwen3ForCausalLM, batch: list[Demonstration]) -> tuple[torch.Tensor, float]:
    """``(loss to minimise, mean cross-entropy of the reply tokens in nats)`` of right-padded demonstrations."""
    import torch
    from torch.nn import functional

    width = max(len(demo.token_ids) for demo in batch)
    tokens = torch.full((len(batch), width), END_OF_TEXT)
    is_reply = torch.zeros(len(batch), width)
    is_token = torch.zeros(len(batch), width)
    for row, demo in enumerate(batch):
        length = len(demo.token_ids)
        tokens[row, :length] = torch.tensor(demo.token_ids)
        is_reply[row, :length] = torch.tensor(demo.is_reply, dtype=torch.float32)
        is_token[row, :length] = 1.0
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    flat = functional.cross_entropy(logits.reshape(-1, VOCABULARY_SIZE), tokens[:, 1:].reshape(-1), reduction="none")
    losses = flat.view(len(batch), width - 1)
    own = is_reply[:, 1:]
    given = is_token[:, 1:] - own
    reply_loss = (losses * own).sum() / own.sum()
    prompt_loss = (losses * given).sum() / given.sum()
    return reply_loss + PROMPT_LOSS_WEIGHT * prompt_loss, reply_loss.item()


def save(model: Qwen3ForCausalLM, out: Path, seed: int) -> None:
    """Write model, tokenizer and model card as a Hugging Face directory, replacing ``out``."""
    from transformers import GenerationConfig

    beside = out.with_name(out.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    model.generation_config = GenerationConfig(do_sample=True, eos_token_id=IM_END, pad_token_id=END_OF_TEXT)
    model.save_pretrained(beside)
    build_tokenizer().save_pretrained(beside)
    (beside / "README.md").write_text(model_card(model, measure(model), seed), encoding="utf-8")
    for path in beside.iterdir():
        path.chmod(0o644)  # safetensors writes 0600
    if out.exists():
        shutil.rmtree(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    beside.rename(out)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hpcrl.quickstart.warmstart", description="Make the policy.")
    parser.add_argument("--out", type=Path, default=Path("models/repair-qwen3"), help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="replace --out if it exists")
    options = parser.parse_args(arguments)
    if options.out.exists() and not options.force:
        print(f"error: {options.out} exists; choose another --out, or give --force", file=sys.stderr)
        return UserError.exit_code
    save(warm_start(options.seed), options.out, options.seed)
    print((options.out / "README.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
