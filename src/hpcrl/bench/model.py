"""A model of a wanted size with random weights: what the benchmark publishes and serves."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["DTYPE_BYTES", "make_model", "parse_size"]

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096)
_LEAST_LAYERS = 16
POSITIONS = 2048


def parse_size(text: str) -> int:
    """``"256MiB"``, ``"1G"``, ``"4096"`` → bytes (binary units). Raises UserError."""
    from hpcrl.errors import UserError

    number = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = number[-1:] if number[-1:].isalpha() else ""
    try:
        size = int(float(number.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise UserError(f"size {text!r}: expected a number of bytes with KiB, MiB or GiB, for example 256MiB")
    return size


def shape_for(nbytes: int, dtype: str) -> tuple[int, int]:
    """(width, layers) of a Llama of about ``nbytes``: as wide as 16 layers allow, then as deep as the size asks for."""
    per_layer = {width: 13 * width * width * DTYPE_BYTES[dtype] for width in _WIDTHS}  # 4 w² of attention, 9 w² of MLP
    width = max((width for width in _WIDTHS if nbytes >= _LEAST_LAYERS * per_layer[width]), default=_WIDTHS[0])
    return width, max(1, round(nbytes / per_layer[width]))


def make_model(directory: Path, nbytes: int, dtype: str) -> Path:
    """Write a Hugging Face model directory of about ``nbytes`` bytes of weights in ``dtype``; returns it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from hpcrl.quickstart.dialogue import END_OF_TEXT, IM_END, VOCABULARY_SIZE
    from hpcrl.quickstart.tokenizer import build_tokenizer

    width, layers = shape_for(nbytes, dtype)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64 or 1,
        num_key_value_heads=width // 64 or 1,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=IM_END,
        pad_token_id=END_OF_TEXT,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))  # a float32 copy would need twice the memory
    try:
        LlamaForCausalLM(config).save_pretrained(str(directory), max_shard_size="1000GB")
    finally:
        torch.set_default_dtype(before)
    build_tokenizer().save_pretrained(str(directory))
    stored = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(stored | {"dtype": dtype}), encoding="utf-8")
    return directory
