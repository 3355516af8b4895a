"""An agent on the ``openai`` client as it is on PyPI: one fenced bash block per turn, its output as the next user message.

The client finds the recording proxy by itself, in OPENAI_BASE_URL and OPENAI_API_KEY; ``$HPCRL_EXEC`` runs a command in the sandbox.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

_BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def main() -> None:
    """One attempt."""
    client = OpenAI()
    instruction = Path(os.environ["HPCRL_INSTRUCTION"]).read_text(encoding="utf-8")
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": instruction}]
    for _ in range(int(os.environ["HPCRL_MAX_TURNS"])):
        choice = client.chat.completions.create(model=os.environ["HPCRL_MODEL"], messages=messages).choices[0]
        text = choice.message.content or ""
        commands = _BLOCK.findall(text)
        if choice.finish_reason != "stop" or len(commands) != 1:  # a reply that was cut is never executed
            return
        done = subprocess.run(
            [os.environ["HPCRL_EXEC"], commands[0]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": done.stdout.decode("utf-8", "replace")})


if __name__ == "__main__":
    main()
