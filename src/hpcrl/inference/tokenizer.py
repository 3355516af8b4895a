"""A Hugging Face tokenizer behind the small interface that the proxy needs, called in its fastest form."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hpcrl.errors import ConfigError, UserError

__all__ = ["HFTokenizer", "end_token_ids"]


class HFTokenizer:
    """Tokenizer and chat template of a model directory. Raises ConfigError when either is missing."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(model))
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path: no tokenizer can be loaded from {model}: {error}") from error
        if not self._tokenizer.chat_template:
            raise ConfigError(f"model.path: the tokenizer in {model} has no chat template; add chat_template.jinja")
        chat_template = self._tokenizer.chat_template
        named = chat_template if isinstance(chat_template, dict) else {"default": chat_template}
        self.template = "\n".join(named.values())
        self.vocabulary = min(len(self._tokenizer), _embedded(model))
        # The Rust tokenizer itself: a tenth of the wrapper's time per call.
        self._fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._fast is not None:
            # A tokenizer.json may carry both; a prompt must never be cut or padded behind our back.
            self._fast.no_truncation()
            self._fast.no_padding()
        self.end_ids = end_token_ids(model, self._tokenizer.eos_token_id)

    def render(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, tools: list[dict[str, Any]] | None = None
    ) -> str:
        """The template's text. Raises UserError when the template refuses the messages."""
        from jinja2 import TemplateError

        offered: list[Any] | None = tools
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tools=offered, tokenize=False, add_generation_prompt=add_generation_prompt
                )
            )
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError, IndexError, RecursionError) as error:
            raise UserError(f"the model's chat template refuses these messages: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of the text; special tokens in it become their ids, none are added."""
        if self._fast is not None:
            return self._fast.encode(text, add_special_tokens=False).ids
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: list[int]) -> str:
        """Text of the ids, special tokens included."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def content(self, token_ids: list[int]) -> str:
        """The readable text of a reply: without special tokens, broken UTF-8 as U+FFFD."""
        if self._fast is not None:
            return self._fast.decode(token_ids, skip_special_tokens=True)
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _embedded(model: Path) -> int:
    """How many ids the model of config.json knows; a tokenizer may have more, or fewer."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return sys.maxsize
    return config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or sys.maxsize


def end_token_ids(model: Path, eos_token_id: int | None) -> frozenset[int]:
    """The tokens that end a reply: the tokenizer's, and those of generation_config.json and config.json."""
    ends = set() if eos_token_id is None else {eos_token_id}
    for name in ("generation_config.json", "config.json"):
        try:
            value = json.loads((model / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError):
            continue
        ends.update([value] if isinstance(value, int) else value or [])
    return frozenset(ends)
