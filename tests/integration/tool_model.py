"""A tiny model that knows one dialogue with tool calls by heart, mistakes included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["INSTRUCTION", "REPLIES", "SOURCE", "save_tool_model"]

INSTRUCTION = "Make it right."
SOURCE = "wrong\n"


def _call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


REPLIES = [
    "Look.\n" + _call("read_file", path="sol.py") + "\n" + _call("bash", cmd="ls"),
    "<tool_call>\n{broken\n</tool_call>",
    _call("write_file", path="sol.py", content="right\n"),
    "Done.",
]
_RESULTS = [
    [SOURCE, "Nothing was run: bash needs the argument 'command'.\n"],
    ["Nothing was run: the tool call is not a JSON object with a name and arguments. Write it again.\n"],
    [""],
]
_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{% if message.content or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}"
    "}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_STEPS = 600
_LEARNT = 0.4
"""Nats for the whole dialogue: two of three are sampled without a slip, at half the temperature nearly all."""
_POSITIONS = 2048


def save_tool_model(path: Path, tools: list[dict[str, Any]]) -> Path:
    """Train it on the dialogue (a few seconds) and write its directory. Raises RuntimeError when it did not learn it."""
    import torch

    from hpcrl.quickstart.model import new_model
    from hpcrl.quickstart.tokenizer import build_tokenizer

    torch.manual_seed(1)
    tokenizer, model = build_tokenizer(), new_model(1)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.model_max_length = model.config.max_position_embeddings = _POSITIONS
    ids, sampled = _dialogue(tokenizer, tools)
    inputs, targets = torch.tensor([ids[:-1]]), torch.tensor([ids[1:]])
    weights = torch.tensor([sampled[1:]], dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    surprise = float("inf")
    for _ in range(_STEPS):
        logits = model(input_ids=inputs).logits
        losses = torch.nn.functional.cross_entropy(logits[0], targets[0], reduction="none") * weights[0]
        surprise = float(losses.detach().sum())
        if surprise < _LEARNT:
            break
        optimizer.zero_grad()
        (losses.sum() / weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    else:
        raise RuntimeError(f"the model did not learn its dialogue: {surprise:.2f} nats")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _dialogue(tokenizer: Any, tools: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Ids of the whole dialogue, and 1 where the model writes; each reply as it is sampled, results as the harness writes them."""
    head = tokenizer.apply_chat_template(
        [{"role": "user", "content": INSTRUCTION}], tools=tools, tokenize=False, add_generation_prompt=True
    )
    parts = [(head, 0)]
    for reply, results in zip(REPLIES, [*_RESULTS, []], strict=True):
        parts.append((reply + "<|im_end|>", 1))
        told = "".join(f"<|im_start|>tool\n{result}<|im_end|>\n" for result in results)
        parts.append((f"\n{told}<|im_start|>assistant\n", 0))
    ids: list[int] = []
    sampled: list[int] = []
    for text, mask in parts[:-1]:
        more = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        ids += more
        sampled += [mask] * len(more)
    return ids, sampled
