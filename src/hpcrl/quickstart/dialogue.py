"""The byte-level token layout of a quickstart episode.

    <|im_start|>user\\n INSTRUCTION <|im_end|>\\n <|im_start|>assistant\\n     opening()
    ```bash\\ncat sol.py\\n```<|im_end|>                                       reply()
    \\n <|im_start|>user\\n OUTPUT <|im_end|>\\n <|im_start|>assistant\\n       observation()
    ```bash\\nsed -i 's|*|%|' sol.py\\n```<|im_end|>                           reply()

The chat template of ``tokenizer.py`` yields the same for the messages of the ``bash`` harness; a test compares the two.
"""

from __future__ import annotations

import re

__all__ = [
    "END_OF_TEXT",
    "IM_END",
    "IM_START",
    "VOCABULARY_SIZE",
    "decode",
    "encode",
    "observation",
    "opening",
    "parse_command",
    "reply",
]

IM_START, IM_END, END_OF_TEXT = 256, 257, 258
VOCABULARY_SIZE = 259

_COMMAND = re.compile(r"\A```bash\n([^\n]*)\n```\Z")


def encode(text: str) -> list[int]:
    """UTF-8 bytes; the id of byte b is b."""
    return list(text.encode())


def decode(token_ids: list[int]) -> str:
    """The text of the byte tokens; special tokens are left out, broken UTF-8 becomes U+FFFD."""
    return bytes(token for token in token_ids if token < IM_START).decode("utf-8", "replace")


def opening(instruction: str) -> list[int]:
    """The prompt of the first turn."""
    return _user(instruction)


def reply(command: str) -> list[int]:
    """An assistant message that runs ``command``, up to and with its end token."""
    return [*encode(f"```bash\n{command}\n```"), IM_END]


def observation(output: str) -> list[int]:
    """What follows a reply: the newline of its end, the output as a user message, the next assistant header."""
    return [*encode("\n"), *_user(output)]


def parse_command(text: str) -> str | None:
    """The command of a reply, or None if the reply is not exactly one fenced command of one line."""
    match = _COMMAND.match(text)
    return match.group(1) if match else None


def _user(text: str) -> list[int]:
    return [IM_START, *encode("user\n" + text), IM_END, *encode("\n"), IM_START, *encode("assistant\n")]
