"""The agent loop: a model behind an OpenAI-compatible URL acts in a sandbox. Knows nothing of training or scoring."""

from hpcrl.harness.bash import BASH
from hpcrl.harness.client import ChatClient, ContextExceeded, Model, Reply, ToolCall
from hpcrl.harness.loop import Ended, Limits, Outcome, run_attempt
from hpcrl.harness.parse import Command, NoCommand, SeveralCommands, parse_reply
from hpcrl.harness.program import run_program
from hpcrl.harness.steps import Agent
from hpcrl.harness.tools import TOOLS

__all__ = [
    "BASH",
    "TOOLS",
    "Agent",
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
    "ToolCall",
    "parse_reply",
    "run_attempt",
    "run_program",
]
