"""The code under test ends with success at once, whatever it was asked."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    "sol", ["raise SystemExit(0)\n", "import os\nos._exit(0)\n", "import os\nos.execv('/bin/true', ['true'])\n"]
)
def test_it_scores_nothing(attack: Any, sol: str) -> None:
    assert attack.score(sol).reward == 0.0
