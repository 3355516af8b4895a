"""What a reply asks for, whatever the harness: steps in order, or the end. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hpcrl.harness.client import Reply

__all__ = ["Agent", "Decision", "End", "Run", "Say", "Step"]


@dataclass(frozen=True, slots=True)
class Run:
    """Run ``command`` in the sandbox. ``call_id``: the tool call it answers; None: its output is a user message."""

    command: str
    call_id: str | None = None
    show_exit_code: bool = False


@dataclass(frozen=True, slots=True)
class Say:
    """Answer the model with ``text``; nothing is run."""

    text: str
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class End:
    """The attempt is over."""

    ended: Literal["no_command", "length"]


Step = Run | Say
Decision = Sequence[Step] | End


@dataclass(frozen=True, slots=True)
class Agent:
    """A built-in harness: how it reads replies, and the tools it offers (OpenAI's JSON)."""

    decide: Callable[[Reply], Decision]
    tools: tuple[dict[str, Any], ...] = ()
