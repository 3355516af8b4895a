"""The committed policy starts where the quickstart needs it: low, well formed, with the skill in reach."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from hpcrl.quickstart.model_card import measure

COMMITTED = Path(__file__).parents[2] / "models" / "repair-qwen3"


@pytest.mark.slow
def test_the_start_fails_by_habit_only() -> None:
    measured = measure(AutoModelForCausalLM.from_pretrained(COMMITTED), repeats=2)
    assert 0.25 <= measured.success <= 0.45
    assert measured.valid_commands >= 0.95
    assert measured.looks_first >= 0.25
    assert measured.success >= 0.6 * measured.looks_first
