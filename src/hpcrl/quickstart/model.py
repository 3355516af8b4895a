"""The quickstart's policy: a 0.8 M-parameter Qwen3 over bytes, small enough to train and serve on two CPU cores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcrl.quickstart.dialogue import END_OF_TEXT, IM_END, VOCABULARY_SIZE

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

__all__ = ["MAX_POSITIONS", "new_model"]

MAX_POSITIONS = 512
"""Tokens; an episode needs about 235."""


def new_model(seed: int) -> Qwen3ForCausalLM:
    """A freshly initialised model in float32. Seeds torch's global generator."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.06,  # the usual 0.02 learns far more slowly at this width
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=IM_END,
        pad_token_id=END_OF_TEXT,
    )
    return Qwen3ForCausalLM(config).float()
