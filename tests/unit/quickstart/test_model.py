from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hpcrl.quickstart.model import new_model

COMMITTED = Path(__file__).parents[3] / "models" / "repair-qwen3"


def test_size_and_seed() -> None:
    model, again, other = new_model(0), new_model(0), new_model(1)
    assert sum(parameter.numel() for parameter in model.parameters()) == 820_992
    assert torch.equal(model.model.embed_tokens.weight, again.model.embed_tokens.weight)
    assert not torch.equal(model.model.embed_tokens.weight, other.model.embed_tokens.weight)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_committed_model_has_this_configuration() -> None:
    committed = AutoModelForCausalLM.from_pretrained(COMMITTED)
    fresh = new_model(0)
    assert {n: p.shape for n, p in committed.named_parameters()} == {n: p.shape for n, p in fresh.named_parameters()}
    assert committed.dtype == torch.float32
    for key in ("rope_parameters", "eos_token_id", "max_position_embeddings", "tie_word_embeddings", "rms_norm_eps"):
        assert getattr(committed.config, key) == getattr(fresh.config, key), key
