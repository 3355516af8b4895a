from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hpcrl.quickstart import dialogue
from hpcrl.quickstart.tokenizer import SPECIAL_TOKENS, build_tokenizer

COMMITTED = Path(__file__).parents[3] / "models" / "repair-qwen3"
TOKENIZER = build_tokenizer()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def loaded(saved: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(saved)


@given(st.text().filter(lambda text: "<|" not in text))
def test_a_token_is_a_byte(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_loads_without_custom_code(loaded: PreTrainedTokenizerFast) -> None:
    assert len(loaded) == dialogue.VOCABULARY_SIZE
    assert loaded.eos_token_id == dialogue.IM_END
    assert loaded.pad_token_id == dialogue.END_OF_TEXT
    assert loaded.bos_token_id is None
    assert loaded.decode(loaded.encode(" it 's , so  . ")) == " it 's , so  . "


def test_special_tokens_are_one_token_and_skippable(loaded: PreTrainedTokenizerFast) -> None:
    for token, token_id in SPECIAL_TOKENS.items():
        assert loaded.encode(token) == [token_id]
        assert loaded.convert_ids_to_tokens(token_id) == token
    assert loaded.decode([dialogue.IM_START, 65, dialogue.IM_END], skip_special_tokens=True) == "A"


def test_chat_template_is_the_dialogue(loaded: PreTrainedTokenizerFast) -> None:
    def template(*messages: tuple[str, str]) -> list[int]:
        chat = [{"role": role, "content": content} for role, content in messages]
        return loaded.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)

    user, output = ("user", "Make f(a) return a."), ("user", "def f(a):\n    return a\n")
    assert template(user) == dialogue.opening(user[1])
    for observed in (output, ("user", "")):
        assert template(user, ("assistant", "```bash\ncat sol.py\n```"), observed) == [
            *dialogue.opening(user[1]),
            *dialogue.reply("cat sol.py"),
            *dialogue.observation(observed[1]),
        ]


def test_committed_tokenizer_is_this_one(saved: Path) -> None:
    for path in saved.iterdir():
        assert (COMMITTED / path.name).read_bytes() == path.read_bytes(), path.name
