"""mini-swe-agent as it is on PyPI (pip install -e ".[agents]") on an attempt of hpcrl: its model is the recording proxy, the
commands of its local environment are run by ``$HPCRL_EXEC`` in the sandbox.

    mini-swe-agent.py           the model calls mini-swe-agent's tool bash
    mini-swe-agent.py --text    for models without tools: one fenced bash block per reply, its output as it is in the next message
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("MSWEA_GLOBAL_CONFIG_DIR", os.environ["TMPDIR"])
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else litellm asks the internet at every start

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

SYSTEM = "You are a helpful assistant that can interact with a computer by the tool bash."
INSTANCE = "{{task}}\n\nWhen you are done, run: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class SandboxEnvironment(LocalEnvironment):
    """The local environment, each command handed through the door to the sandbox."""

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        command = f"{shlex.quote(os.environ['HPCRL_EXEC'])} {shlex.quote(action.get('command', ''))}"
        return super().execute({**action, "command": command}, cwd, timeout=timeout)


class PlainModel(LitellmTextbasedModel):
    """Without the system message, which mini-swe-agent always writes, where it is empty."""

    def _prepare_messages_for_api(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        kept = [message for message in messages if message["role"] != "system" or message["content"]]
        return super()._prepare_messages_for_api(kept)


def main(text: bool) -> None:
    """One attempt."""
    settings: dict[str, Any] = {
        "model_name": f"openai/{os.environ['HPCRL_MODEL']}",
        "model_kwargs": {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]},
        "cost_tracking": "ignore_errors",
    }
    model: LitellmModel
    if text:
        block, output = r"```bash\n(.*?)\n```", "{{output.output}}"
        model = PlainModel(**settings, action_regex=block, observation_template=output)
    else:
        model = LitellmModel(**settings)
    agent = DefaultAgent(
        model,
        SandboxEnvironment(timeout=600),  # the sandbox has its own, shorter limit
        system_template="" if text else SYSTEM,
        instance_template="{{task}}" if text else INSTANCE,
        step_limit=int(os.environ["HPCRL_MAX_TURNS"]),
    )
    agent.run(Path(os.environ["HPCRL_INSTRUCTION"]).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(text="--text" in sys.argv[1:])
