from __future__ import annotations

import pytest

from hpcrl.cli.plain import plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("größer\n\tals ✓", "größer\n\tals ✓"),
        ("\x1b]52;c;cm0=\x07", "␛]52;c;cm0=␇"),
        ("50 %\r100 %\x7f\x9b2J", "50 %␍100 %␡\N{REPLACEMENT CHARACTER}2J"),
    ],
)
def test_a_terminal_is_not_spoken_to(text: str, shown: str) -> None:
    assert plain(text) == shown
