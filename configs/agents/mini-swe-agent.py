"""mini-swe-agent as it is on PyPI (pip install -e ".[agents]") on an attempt of hpcrl: its model is the recording proxy, the
commands of its local environment are run by ``$HPCRL_EXEC`` in the sandbox.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

os.environ.setdefault("MSWEA_GLOBAL_CONFIG_DIR", os.environ["TMPDIR"])
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else litellm asks the internet at every start

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

SYSTEM = "You are a helpful assistant that can interact with a computer by the tool bash."
INSTANCE = "{{task}}\n\nWhen you are done, run: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class SandboxEnvironment(LocalEnvironment):
    """The local environment, each command handed through the door to the sandbox."""

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        command = f"{shlex.quote(os.environ['HPCRL_EXEC'])} {shlex.quote(action.get('command', ''))}"
        return super().execute({**action, "command": command}, cwd, timeout=timeout)


def main() -> None:
    """One attempt."""
    model = LitellmModel(
        model_name=f"openai/{os.environ['HPCRL_MODEL']}",
        model_kwargs={"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]},
        cost_tracking="ignore_errors",
    )
    agent = DefaultAgent(
        model,
        SandboxEnvironment(timeout=600),  # the sandbox has its own, shorter limit
        system_template=SYSTEM,
        instance_template=INSTANCE,
        step_limit=int(os.environ["HPCRL_MAX_TURNS"]),
    )
    agent.run(Path(os.environ["HPCRL_INSTRUCTION"]).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
