"""Shows a pre-trained chat model a few hundred scripted repairs, so that reinforcement finds something to reward.

    python -m hpcrl.quickstart.coldstart --model .cache/models/smollm2-135m --out .cache/models/smollm2-135m-repair

A small instruct model seldom writes one fenced command, and hardly ever the right one: no group of rollouts has any variance,
and no step trains. This is the usual remedy, a short supervised start ("cold start" in DeepSeek-R1, arXiv:2501.12948) on clean
demonstrations of split ``train``: loss on the replies only, AdamW, linear warm-up and decay. Minutes on two cores; the model is
held in float32 and written in the type it came in.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrl.errors import HpcrlError, UserError
from hpcrl.quickstart.demonstrations import LOOK
from hpcrl.quickstart.families import Problem, draw

if TYPE_CHECKING:
    import torch

__all__ = ["cold_start", "episode", "train"]

BATCH_SIZE = 8
LEARNING_RATE = 1e-4
WARMUP_STEPS = 5
IGNORED = -100  # what cross_entropy leaves out


def episode(tokenizer: Any, problem: Problem) -> tuple[list[int], list[int]]:
    """``(token_ids, labels)`` of one clean demonstration in the model's own chat template; a label is the token itself where it is
    the assistant's own, else IGNORED. Raises UserError for a template that rewrites earlier messages."""
    messages: list[dict[str, str]] = []
    token_ids: list[int] = []
    labels: list[int] = []
    text = ""
    for said, command in ((problem.instruction, LOOK), (problem.source, problem.fix)):
        messages.append({"role": "user", "content": said})
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        messages.append({"role": "assistant", "content": f"```bash\n{command}\n```"})
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        if not (prompt.startswith(text) and whole.startswith(prompt)):
            raise UserError("the chat template rewrites earlier messages; demonstrations need one that only appends")
        end = whole.index(tokenizer.eos_token, len(prompt)) + len(tokenizer.eos_token)
        for part, own in ((prompt[len(text) :], False), (whole[len(prompt) : end], True)):
            ids = tokenizer(part, add_special_tokens=False)["input_ids"]
            token_ids += ids
            labels += ids if own else [IGNORED] * len(ids)
        text = whole[:end]
    return token_ids, labels


def train(model: Any, tokenizer: Any, steps: int, rng: random.Random) -> list[float]:
    """Train in place; returns the mean cross-entropy of the reply tokens (nats) per step."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    losses: list[float] = []
    started = time.monotonic()
    model.train()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / WARMUP_STEPS) * (1 - (step - 1) / steps)
        input_ids, labels = _batch(tokenizer, rng)
        logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
        own = labels[:, 1:] != IGNORED
        loss = torch.nn.functional.cross_entropy(logits[own].float(), labels[:, 1:][own])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step}/{steps} loss {losses[-1]:.3f} {time.monotonic() - started:.0f} s", flush=True)
    model.eval()
    return losses


def _batch(tokenizer: Any, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels (BATCH_SIZE, width), padded on the right."""
    import torch

    episodes = [episode(tokenizer, draw(rng, "train")) for _ in range(BATCH_SIZE)]
    width = max(len(ids) for ids, _ in episodes)
    input_ids = torch.zeros((BATCH_SIZE, width), dtype=torch.int64)
    labels = torch.full((BATCH_SIZE, width), IGNORED)
    for row, (ids, own) in enumerate(episodes):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(own)] = torch.tensor(own)
    return input_ids, labels


def cold_start(source: Path, out: Path, *, steps: int, seed: int, force: bool = False) -> None:
    """Train the chat model in ``source`` and write it to ``out``, which appears complete or not at all.

    Raises UserError when ``source`` is no model with a chat template, or ``out`` exists and ``force`` is false.
    """
    if out.exists() and not force:
        raise UserError(f"{out} exists; choose another --out, or give --force")
    if not (source / "config.json").is_file():
        raise UserError(
            f"{source} is no model directory (no config.json); fetch one with python -m hpcrl.quickstart.smollm2"
        )
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    if tokenizer.chat_template is None:
        raise UserError(f"the tokenizer in {source} has no chat template")
    written_as = AutoConfig.from_pretrained(source).dtype or torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    train(model, tokenizer, steps, random.Random(seed))

    beside = out.with_name(out.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    model.to(written_as).save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    for path in beside.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, which keeps the other users of a shared directory out
    if out.exists():
        shutil.rmtree(out)
    beside.rename(out)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hpcrl.quickstart.coldstart", description="A short supervised start."
    )
    parser.add_argument(
        "--model", type=Path, default=Path(".cache/models/smollm2-135m"), help="directory of the chat model"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(".cache/models/smollm2-135m-repair"), help="directory to write"
    )
    parser.add_argument("--steps", type=int, default=24, help=f"optimizer steps of {BATCH_SIZE} demonstrations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="replace --out if it exists")
    options = parser.parse_args(arguments)
    try:
        cold_start(options.model, options.out, steps=options.steps, seed=options.seed, force=options.force)
    except HpcrlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{options.model} after {options.steps} steps on demonstrations: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
