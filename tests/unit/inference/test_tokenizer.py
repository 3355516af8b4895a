from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.errors import ConfigError, UserError
from hpcrl.inference.tokenizer import HFTokenizer, end_token_ids


def test_a_model_directory_is_loaded(tmp_path: Path) -> None:
    from hpcrl.quickstart.dialogue import IM_END, encode, opening
    from hpcrl.quickstart.tokenizer import build_tokenizer

    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [IM_END, 258]}))
    tokenizer = HFTokenizer(tmp_path)
    assert tokenizer.end_ids == {IM_END, 258}
    text = tokenizer.render([{"role": "user", "content": "é"}], True)
    assert tokenizer.encode(text) == opening("é")
    assert tokenizer.decode(opening("é")) == text
    assert tokenizer.content([*encode("a b ."), 256, 0xC3]) == "a b .\ufffd"
    with pytest.raises(UserError, match="chat template refuses"):
        tokenizer.render([{"role": "user"}], True)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        HFTokenizer(tmp_path)


def test_end_tokens_come_from_all_places(tmp_path: Path) -> None:
    assert end_token_ids(tmp_path, 5) == {5}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert end_token_ids(tmp_path, None) == {0}
