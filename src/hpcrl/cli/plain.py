"""Text that an agent, or code under test, may have made: shown on a terminal without speaking to it."""

from __future__ import annotations

__all__ = ["plain"]

_PICTURES = 0x2400
"""Unicode's pictures of the control characters begin here."""
_KEPT = "\n\t"
_TABLE = {code: _PICTURES + code for code in range(0x20) if chr(code) not in _KEPT}
_TABLE |= {0x7F: 0x2421} | dict.fromkeys(range(128, 160), 65533)


def plain(text: str) -> str:
    """``text`` with its control characters, but for line feeds and tabs, as visible signs.

    Example: ``plain("\\x1b[2J")`` is ``"␛[2J"``; a terminal would have been cleared.
    """
    return text.translate(_TABLE)
