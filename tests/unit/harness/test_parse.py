from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.harness.parse import Command, NoCommand, SeveralCommands, parse_reply


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("```bash\ncat sol.py\n```", Command("cat sol.py")),
        ("```bash\ncat sol.py\n```\n", Command("cat sol.py")),
        ("I look first.\n```bash\ncat sol.py\n```\nThen I fix it.", Command("cat sol.py")),
        ("```sh\nls\n```", Command("ls")),
        ("```Bash \nls\n```", Command("ls")),
        ("```bash\r\nls\r\n```\r\n", Command("ls")),
        ("```bash\nfor f in *; do\n  cat $f\ndone\n```", Command("for f in *; do\n  cat $f\ndone")),
        ("````bash\ncat <<'E'\n```\nE\n````", Command("cat <<'E'\n```\nE")),
        ("```python\nprint(1)\n```\n```bash\nls\n```", Command("ls")),
        ("```text\n```bash\nls\n```", NoCommand()),
        ("```bash\nprintf '\x0c\u2028'\n```", Command("printf '\x0c\u2028'")),
        ("", NoCommand()),
        ("done", NoCommand()),
        ("cat sol.py", NoCommand()),
        ("```\nls\n```", NoCommand()),
        ("```bash\n\n```", NoCommand()),
        ("```bash\nrm -rf x", NoCommand()),
        ("```bash ls```", NoCommand()),
        ("use ```bash\nls\n```", NoCommand()),
        ("```bash\nls\n```\n```bash\npwd\n```", SeveralCommands(2)),
        ("```bash\nls\n```\n```bash\npwd\n", Command("ls")),
        (f"```bash{' ' * 300_000}x\nls\n```{' ' * 300_000}", Command("ls")),
        (f"```bash\nls\n```{' ' * 300_000}x", NoCommand()),
    ],
)
def test_parse(reply: str, expected: object) -> None:
    assert parse_reply(reply) == expected


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="`\r"), min_size=1))
def test_any_fenced_text_is_the_command_verbatim(command: str) -> None:
    expected = Command(command.strip()) if command.strip() else NoCommand()
    assert parse_reply(f"```bash\n{command}\n```") == expected


@given(st.text(alphabet="`bash \nx\r"))
def test_never_raises(reply: str) -> None:
    assert isinstance(parse_reply(reply), Command | NoCommand | SeveralCommands)
