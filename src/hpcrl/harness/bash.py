"""The ``bash`` harness: one shell command per turn, in a fenced block; its output comes back as a user message. Pure.

    messages = [user: instruction]
    reply with one command   → run it; its output, verbatim, is the next user message
    reply with several       → nothing is run; the next user message says so
    reply without a command  → the agent is done
    reply cut by length      → nothing of it is run; the attempt ends

Exit codes are not shown unless asked for: what the model sees is what the command printed.
"""

from __future__ import annotations

from hpcrl.harness.client import Reply
from hpcrl.harness.parse import Command, NoCommand, SeveralCommands, parse_reply
from hpcrl.harness.steps import Agent, Decision, End, Run, Say

__all__ = ["BASH", "decide", "observation"]


def decide(reply: Reply) -> Decision:
    """What a reply asks for."""
    if reply.finish_reason == "length":
        return End("length")
    match parse_reply(reply.text):
        case Command(text):
            return [Run(text)]
        case SeveralCommands(count):
            return [Say(f"Nothing was run: the reply has {count} bash blocks. Write exactly one.\n")]
        case NoCommand():
            return End("no_command")


def observation(output: str, exit_code: int, timed_out: bool, timeout_s: float, show_exit_code: bool) -> str:
    """The user message for a command's result. ``output`` already carries the marker of what was cut from it."""
    notes = []
    if timed_out:
        notes.append(f"[stopped after {timeout_s:g} s]")
    elif show_exit_code and exit_code != 0:
        notes.append(f"[exit code {exit_code}]")
    if not notes:
        return output
    newline = "" if not output or output.endswith("\n") else "\n"
    return output + newline + "\n".join(notes) + "\n"


BASH = Agent(decide)
