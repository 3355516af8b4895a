"""Token-exact dialogue: what the model sampled is never re-encoded from text.

A *context* is a token sequence the model really saw, with the messages it stands for. A request whose messages extend a context is
prompted with the context's ids and the tokenised rest:

    context   <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n  hello<|im_end|>
              └──────────────── prompt ids ──────────────────────────┘  └─ sampled ──┘
    delta                                                                            \\n<|im_start|>user\\n…<|im_start|>assistant\\n
                                                                                     └ the template's tail of a reply, next messages

If a reply was cut (no end token was sampled), the end token belongs to the delta. If the template renders the new list differently up
to the reply, or the messages were edited, it is no extension: the request begins a new context with all of it tokenised.
Pure: needs only the two operations of ``ChatTokenizer``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["ChatTokenizer", "Context", "Dialogue", "Prompt"]

Messages = list[dict[str, Any]]

_SENTINEL = "hpcrl-reply"


class ChatTokenizer(Protocol):
    """What is needed of a tokenizer with a chat template."""

    def render(self, messages: Messages, add_generation_prompt: bool) -> str:
        """The template's text. Raises UserError when the template refuses the messages."""

    def encode(self, text: str) -> list[int]:
        """Ids of the text; special tokens in it become their ids, none are added."""

    def decode(self, token_ids: list[int]) -> str:
        """Text of the ids, special tokens included."""


@dataclass(frozen=True, slots=True)
class Context:
    """A token sequence that ends with a sampled reply.

    ``text`` is the rendered prompt before that reply, ``messages`` end with the reply as it was returned.
    """

    token_ids: list[int]
    text: str
    messages: Messages


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to send for a request: ``token_ids`` = the context's ids (none for a new context) + ``delta``."""

    token_ids: list[int]
    delta: list[int]
    text: str
    extends: bool


class Dialogue:
    """The prompts of one tokenizer's dialogues. ``end_ids`` are the tokens that end a reply."""

    def __init__(self, tokenizer: ChatTokenizer, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._tail = self._reply_tail()

    def render(self, messages: Messages) -> str:
        """The text of a request: all messages, then the header of the reply to be sampled."""
        return self._tokenizer.render(messages, True)

    def begin(self, text: str) -> Prompt:
        """The prompt of a new context."""
        ids = self._tokenizer.encode(text)
        return Prompt(ids, ids, text, extends=False)

    def extend(self, context: Context, messages: Messages, text: str) -> Prompt | None:
        """The prompt that continues ``context`` with ``messages`` (rendered: ``text``), or None when they do not extend it."""
        known = len(context.messages)
        if len(messages) <= known or messages[:known] != context.messages:
            return None
        rest = self._rest(context, text)
        if rest is None:
            return None
        delta = self._tokenizer.encode(self._open_tail(context) + rest)
        return Prompt(context.token_ids + delta, delta, text, extends=True)

    def _rest(self, context: Context, text: str) -> str | None:
        """What follows the last reply (with its tail) in ``text``; None when ``text`` does not begin with the context."""
        expected = context.text + str(context.messages[-1].get("content") or "") + self._tail
        if text.startswith(expected):
            return text[len(expected) :]
        # The template may write a reply otherwise than it was sampled (trimmed, say): ask it, with the reply as the last message.
        rendered = self._tokenizer.render(context.messages, False)
        if rendered.startswith(context.text) and rendered.endswith(self._tail) and text.startswith(rendered):
            return text[len(rendered) :]
        return None

    def _open_tail(self, context: Context) -> str:
        """The part of the tail that was not sampled."""
        last = context.token_ids[-1:]
        if last and last[0] in self._end_ids:
            return self._tail.removeprefix(self._tokenizer.decode(last))
        return self._tail

    def _reply_tail(self) -> str:
        """What the template writes after a reply's content; the same for every reply."""
        question = [{"role": "user", "content": "question"}]
        rendered = self._tokenizer.render([*question, {"role": "assistant", "content": _SENTINEL}], False)
        return rendered[rendered.rindex(_SENTINEL) + len(_SENTINEL) :]
