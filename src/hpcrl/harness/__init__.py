"""The agent loop: a model behind an OpenAI-compatible URL acts in a sandbox. Knows nothing of training or scoring."""

from hpcrl.harness.client import ChatClient, ContextExceeded, Model, Reply
from hpcrl.harness.loop import Ended, Limits, Outcome, run_attempt
from hpcrl.harness.parse import Command, NoCommand, SeveralCommands, parse_reply

__all__ = [
    "ChatClient",
    "Command",
    "ContextExceeded",
    "Ended",
    "Limits",
    "Model",
    "NoCommand",
    "Outcome",
    "Reply",
    "SeveralCommands",
    "parse_reply",
    "run_attempt",
]
