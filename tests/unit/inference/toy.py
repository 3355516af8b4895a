"""Tokenizers of the tests: one id per character, specials as one id each, in three manners of templates; and the quickstart's."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

START, END, OTHER_END = 100001, 100002, 100003
SPECIALS = {"<|im_start|>": START, "<|im_end|>": END, "<|endoftext|>": OTHER_END}
_SPLIT = re.compile("(" + "|".join(map(re.escape, SPECIALS)) + ")")


class ToyTokenizer:
    """``manner``: ``chatml`` writes replies as they are, ``trim`` trims them, ``forget`` drops <think>…</think> of earlier turns."""

    def __init__(self, manner: str = "chatml") -> None:
        self.manner = manner
        self.end = END
        self.end_ids = frozenset({END, OTHER_END})
        self.template = "<tool_call>"
        self.vocabulary = sys.maxunicode + 1
        self.renders = 0

    def render(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, tools: list[dict[str, Any]] | None = None
    ) -> str:
        self.renders += 1
        text = "".join(f"<|im_start|>tool {tool['function']['name']}<|im_end|>\n" for tool in tools or [])
        text += "".join(self._one(message, message is messages[-1]) for message in messages)
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")

    def _one(self, message: dict[str, Any], last: bool) -> str:
        content = message["content"]
        if message["role"] == "assistant":
            if self.manner == "trim":
                content = content.strip()
            if self.manner == "forget" and not last:
                content = re.sub(r"<think>.*</think>", "", content)
            for call in message.get("tool_calls", []):
                content += f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>"
        return f"<|im_start|>{message['role']}\n{content}<|im_end|>\n"

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in _SPLIT.split(text):
            ids += [SPECIALS[part]] if part in SPECIALS else [ord(letter) for letter in part]
        return ids

    def decode(self, token_ids: list[int]) -> str:
        names = {token: name for name, token in SPECIALS.items()}
        return "".join(names.get(token) or chr(token) for token in token_ids)

    def content(self, token_ids: list[int]) -> str:
        return "".join(chr(token) for token in token_ids if token not in SPECIALS.values())


class ByteTokenizer(ToyTokenizer):
    """The quickstart's real tokenizer and template."""

    def __init__(self) -> None:
        from hpcrl.quickstart.dialogue import IM_END
        from hpcrl.quickstart.tokenizer import build_tokenizer

        self._hf = build_tokenizer()
        self.end = IM_END
        self.end_ids = frozenset({IM_END})

    def render(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, tools: list[dict[str, Any]] | None = None
    ) -> str:
        return str(self._hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt))

    def encode(self, text: str) -> list[int]:
        return list(self._hf.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: list[int]) -> str:
        return str(self._hf.decode(token_ids))
