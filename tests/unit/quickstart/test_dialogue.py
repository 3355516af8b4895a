from __future__ import annotations

import pytest

from hpcrl.quickstart import dialogue


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("```bash\ncat sol.py\n```", "cat sol.py"),
        ("```bash\n\n```", ""),
        ("```bash\na\nb\n```", None),
        ("cat sol.py", None),
        ("```bash\ncat sol.py\n``` now", None),
    ],
)
def test_parse_command(text: str, command: str | None) -> None:
    assert dialogue.parse_command(text) == command


def test_reply_is_parsed_back() -> None:
    tokens = dialogue.reply("sed -i 's|*|%|' sol.py")
    assert tokens[-1] == dialogue.IM_END
    assert dialogue.parse_command(dialogue.decode(tokens)) == "sed -i 's|*|%|' sol.py"


def test_broken_utf8_is_readable() -> None:
    assert dialogue.decode([0xFF, 65]) == "�A"
