"""Token-exact dialogue: what the model sampled is never re-encoded from text.

A *context* is a token sequence the model really saw, with the messages it stands for. A request whose messages extend a context is
prompted with the context's ids and the tokenised rest:

    context   <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n  hello<|im_end|>
              └──────────────── prompt ids ──────────────────────────┘  └─ sampled ──┘
    delta                                                                            \\n<|im_start|>user\\n…<|im_start|>assistant\\n
                                                                                     └ the template's tail of a reply, next messages

If a reply was cut (no end token was sampled), the end token belongs to the delta. If the template renders the new list differently up
to the reply, or the messages were edited, it is no extension: the request begins a new context with all of it tokenised. Only the
reply itself may be rendered otherwise than it was sampled (trimmed, a tool call's JSON respaced), because its ids stand for it.
Pure: needs only the operations of ``ChatTokenizer``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from hpcrl.errors import UserError

__all__ = ["ChatTokenizer", "Context", "Dialogue", "Messages", "PlainText", "Prompt", "Prompts", "Tools"]

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]

_SENTINEL = "hpcrl-reply"


class ChatTokenizer(Protocol):
    """What is needed of a tokenizer with a chat template."""

    def render(self, messages: Messages, add_generation_prompt: bool, tools: Tools | None = None) -> str:
        """The template's text. Raises UserError when the template refuses the messages."""

    def encode(self, text: str) -> list[int]:
        """Ids of the text; special tokens in it become their ids, none are added."""

    def decode(self, token_ids: list[int]) -> str:
        """Text of the ids, special tokens included."""


@dataclass(frozen=True, slots=True)
class Context:
    """A token sequence that ends with a sampled reply.

    ``text`` is the rendered prompt before that reply, ``messages`` end with the reply as it was returned, ``sampled`` is the reply's
    text as sampled, without its end token.
    """

    token_ids: list[int]
    text: str
    messages: Messages
    tools: Tools | None = None
    sampled: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to send for a request: ``token_ids`` = the context's ids (none for a new context) + ``delta``."""

    token_ids: list[int]
    delta: list[int]
    text: str
    extends: bool


class Prompts(Protocol):
    """How requests of one kind become prompts."""

    def render(self, messages: Messages, tools: Tools | None = None) -> str:
        """The text of a request. Raises UserError."""

    def begin(self, text: str) -> Prompt:
        """The prompt of a new context."""

    def continues(self, context: Context, messages: Messages, tools: Tools | None = None) -> bool:
        """Whether the request is the context's dialogue with something more."""

    def extend(self, context: Context, messages: Messages, text: str, tools: Tools | None = None) -> Prompt | None:
        """The prompt that continues ``context`` with the request rendered as ``text``, or None when it cannot."""


class Dialogue:
    """The prompts of one tokenizer's dialogues. ``end_ids`` are the tokens that end a reply."""

    def __init__(self, tokenizer: ChatTokenizer, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._tail = self._reply_tail()

    def render(self, messages: Messages, tools: Tools | None = None) -> str:
        """The text of a request: all messages, then the header of the reply to be sampled."""
        return self._tokenizer.render(messages, True, tools)

    def begin(self, text: str) -> Prompt:
        """The prompt of a new context."""
        ids = self._tokenizer.encode(text)
        return Prompt(ids, ids, text, extends=False)

    def continues(self, context: Context, messages: Messages, tools: Tools | None = None) -> bool:
        """Whether the messages are the context's and at least one more, with the same tools."""
        known = len(context.messages)
        return len(messages) > known and messages[:known] == context.messages and tools == context.tools

    def extend(self, context: Context, messages: Messages, text: str, tools: Tools | None = None) -> Prompt | None:
        """The prompt that continues ``context`` with ``messages`` (rendered: ``text``), or None when they do not extend it."""
        if not self.continues(context, messages, tools):
            return None
        rest = self._rest(context, messages, text)
        if rest is None:
            return None
        delta = self._tokenizer.encode(self._open_tail(context) + rest)
        return Prompt(context.token_ids + delta, delta, text, extends=True)

    def _rest(self, context: Context, messages: Messages, text: str) -> str | None:
        """What follows the last reply (with its tail) in ``text``; None when ``text`` does not begin with the context."""
        if not text.startswith(context.text):
            return None
        start = len(context.text)
        called = bool(context.messages[-1].get("tool_calls"))
        content = None if called else str(context.messages[-1].get("content") or "")
        for reply in (content, context.sampled):
            if reply is not None and text.startswith(reply + self._tail, start):
                return text[start + len(reply) + len(self._tail) :]
        # The template may write a reply otherwise than it was sampled (trimmed, say): ask it, with the reply as the last message.
        rendered = self._tokenizer.render(context.messages, False, context.tools)
        if rendered.startswith(context.text) and rendered.endswith(self._tail) and text.startswith(rendered):
            return text[len(rendered) :]
        return self._rest_after_calls(context, messages, text) if called else None

    def _rest_after_calls(self, context: Context, messages: Messages, text: str) -> str | None:
        """For templates that write the last message otherwise than an earlier one: what follows a plain reply in its place."""
        known = len(context.messages)
        plain = [*messages[: known - 1], {"role": "assistant", "content": _SENTINEL}, *messages[known:]]
        try:
            other = self._tokenizer.render(plain, True, context.tools)
        except UserError:
            return None
        before, found, after = other.partition(_SENTINEL)
        if not (found and before.startswith(context.text) and after.startswith(self._tail)):
            return None
        rest = after[len(self._tail) :]
        content = str(context.messages[-1].get("content") or "").strip()
        if text.endswith(rest) and content in text[len(context.text) : len(text) - len(rest)]:
            return rest
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


class PlainText:
    """The prompt of one text completion: no template. ``token_ids`` when it was given as ids.

    It extends a context whose ids, or whose text with the reply exactly as sampled, it begins with.
    """

    def __init__(self, tokenizer: ChatTokenizer, end_ids: frozenset[int], token_ids: list[int] | None = None) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._ids = token_ids

    def render(self, messages: Messages, tools: Tools | None = None) -> str:
        """The prompt itself: the content of the only message."""
        return str(messages[0]["content"])

    def begin(self, text: str) -> Prompt:
        """The prompt of a new context."""
        ids = self._tokenizer.encode(text) if self._ids is None else self._ids
        return Prompt(ids, ids, text, extends=False)

    def continues(self, context: Context, messages: Messages, tools: Tools | None = None) -> bool:
        """Whether the prompt begins with all of the context."""
        if context.messages[0]["role"] != messages[0]["role"]:
            return False
        if self._ids is not None:
            return self._ids[: len(context.token_ids)] == context.token_ids
        return str(messages[0]["content"]).startswith(self._all_of(context))

    def extend(self, context: Context, messages: Messages, text: str, tools: Tools | None = None) -> Prompt | None:
        """The prompt that continues ``context``, or None."""
        if not self.continues(context, messages):
            return None
        if self._ids is not None:
            return Prompt(self._ids, self._ids[len(context.token_ids) :], text, extends=True)
        delta = self._tokenizer.encode(text[len(self._all_of(context)) :])
        return Prompt(context.token_ids + delta, delta, text, extends=True)

    def _all_of(self, context: Context) -> str:
        last = context.token_ids[-1:]
        end = self._tokenizer.decode(last) if last and last[0] in self._end_ids else ""
        return context.text + (context.sampled or "") + end
