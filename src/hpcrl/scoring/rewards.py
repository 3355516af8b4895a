"""What a verifier left behind: reward.txt (one number) or reward.json (name → number)."""

from __future__ import annotations

import json
import math

from hpcrl.errors import InfraError

__all__ = ["parse_json", "parse_text", "total"]

_SHOWN = 80


def parse_text(content: bytes) -> dict[str, float]:
    """``b"0.5\\n"`` → ``{"reward": 0.5}``. Raises InfraError("bad_reward") unless it is one finite number."""
    text = content.decode("utf-8", "replace").strip()
    try:
        return {"reward": _finite(float(text))}
    except ValueError:
        raise InfraError("bad_reward", f"reward.txt must hold one finite number, not {text[:_SHOWN]!r}") from None


def parse_json(content: bytes) -> dict[str, float]:
    """``b'{"tests": 1, "style": 0.5}'`` → the same as floats. Raises InfraError("bad_reward")."""
    try:
        value = json.loads(content)
        if not isinstance(value, dict) or not value:
            raise ValueError
        return {name: _finite(number) for name, number in value.items()}
    except (ValueError, TypeError, OverflowError):
        shown = content[:_SHOWN].decode("utf-8", "replace")
        raise InfraError("bad_reward", f"reward.json must map names to finite numbers, not {shown!r}") from None


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError
    return float(value)


def total(rewards: dict[str, float]) -> float:
    """The one number to train on: the entry ``reward`` where there is one, else the mean of all. ``rewards`` is not empty."""
    if "reward" in rewards:
        return rewards["reward"]
    return math.fsum(rewards.values()) / len(rewards)
