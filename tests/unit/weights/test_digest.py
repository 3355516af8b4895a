from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.errors import UserError
from hpcrl.weights.digest import chunk_digest, model_config_digest, tokenizer_digest


def test_known_value() -> None:
    # The published XXH3-128 of no bytes, seed 0.
    assert chunk_digest(b"") == "99aa06d3014798d86001c324468d497f"


def test_tokenizer_digest_sees_content_and_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("one")
    first = tokenizer_digest(tmp_path)
    (tmp_path / "weights.safetensors").write_text("not a tokenizer file")
    assert tokenizer_digest(tmp_path) == first
    (tmp_path / "tokenizer.json").write_text("two")
    second = tokenizer_digest(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("")
    assert len({first, second, tokenizer_digest(tmp_path)}) == 3


def test_config_digest_ignores_order_and_provenance(tmp_path: Path) -> None:
    def digest(**values: object) -> str:
        (tmp_path / "config.json").write_text(json.dumps(values))
        return model_config_digest(tmp_path)

    assert digest(a=1, b=2) == digest(b=2, a=1, _name_or_path="x", transformers_version="5")
    assert digest(a=1, b=2) != digest(a=1, b=3)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        tokenizer_digest(tmp_path)
    with pytest.raises(UserError, match=r"config\.json"):
        model_config_digest(tmp_path)
