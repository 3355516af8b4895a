"""A short supervised start of any chat model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hpcrl.errors import UserError
from hpcrl.quickstart.coldstart import IGNORED, cold_start, episode, train
from hpcrl.quickstart.demonstrations import demonstrate
from hpcrl.quickstart.families import draw
from hpcrl.quickstart.model import new_model
from hpcrl.quickstart.tokenizer import build_tokenizer


def test_an_episode_is_what_the_dialogue_looks_like_to_the_model() -> None:
    tokenizer = build_tokenizer()
    for seed in range(20):
        problem = draw(random.Random(seed), "train")
        ids, labels = episode(tokenizer, problem)
        expected = demonstrate(problem, random.Random(0))
        assert ids == expected.token_ids
        assert [label != IGNORED for label in labels] == expected.is_reply
        assert all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True))


def test_a_template_that_rewrites_the_past_is_refused() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}<{{ m['content'] }}>{% endfor %}<|im_end|>"
    with pytest.raises(UserError, match="rewrites earlier messages"):
        episode(tokenizer, draw(random.Random(0), "train"))


def test_training_lowers_the_loss() -> None:
    losses = train(new_model(0), build_tokenizer(), 6, random.Random(0))
    assert losses[-1] < losses[0] - 0.05


def test_what_is_there_is_kept_and_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exists; choose another --out"):
        cold_start(tmp_path, tmp_path, steps=1, seed=0)
    with pytest.raises(UserError, match=r"no model directory \(no config.json\)"):
        cold_start(tmp_path, tmp_path / "out", steps=1, seed=0)
