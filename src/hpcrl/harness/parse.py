"""A reply → the one command in it. Pure.

The format is one fenced block, with or without prose around it::

    Let me look at the file.
    ```bash
    cat sol.py
    ```

Only ``bash`` and ``sh`` fences count; other fences (quoted file content, output) are prose. A fence closes with a run of
backticks at least as long as the one that opened it, alone on its line, so a command may itself contain shorter fences.
A fence that never closes is no command: half a command is not executed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Command", "NoCommand", "SeveralCommands", "parse_reply"]

_FENCE = re.compile(r"^ {0,3}(`{3,})(.*)$")  # blank space is stripped outside: a model may write any number of spaces
_SHELLS = frozenset({"bash", "sh"})


@dataclass(frozen=True, slots=True)
class Command:
    """The reply holds exactly one command. Example: ``Command("cat sol.py")``."""

    text: str


@dataclass(frozen=True, slots=True)
class NoCommand:
    """The reply holds no complete, non-empty command."""


@dataclass(frozen=True, slots=True)
class SeveralCommands:
    """The reply holds ``count`` > 1 commands, so none of them is chosen."""

    count: int


def parse_reply(text: str) -> Command | NoCommand | SeveralCommands:
    """Find the fenced shell command of a reply. The command's own line breaks are kept, outer blank space is not."""
    commands = [block for block in _shell_blocks(text) if block]
    if not commands:
        return NoCommand()
    if len(commands) > 1:
        return SeveralCommands(len(commands))
    return Command(commands[0])


def _shell_blocks(text: str) -> list[str]:
    """The stripped contents of all closed shell fences, in order."""
    blocks: list[str] = []
    opened: tuple[int, bool] | None = None  # (backticks, is a shell fence)
    lines: list[str] = []
    # Not splitlines(): a command may hold form feeds or Unicode separators, which are not line ends to a shell.
    for line in text.replace("\r\n", "\n").split("\n"):
        fence = _FENCE.match(line)
        if opened is None:
            # An info string with backticks is inline code that happens to start a line, not a fence.
            if fence and "`" not in fence[2]:
                words = fence[2].split()
                opened = len(fence[1]), bool(words) and words[0].lower() in _SHELLS
                lines = []
        elif fence and len(fence[1]) >= opened[0] and not fence[2].strip(" \t"):
            if opened[1]:
                blocks.append("\n".join(lines).strip())
            opened = None
        else:
            lines.append(line)
    return blocks
