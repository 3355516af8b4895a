from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import END, OTHER_END, ByteTokenizer, ToyTokenizer

from hpcrl.inference.tokens import Context, Dialogue

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<|>\x00"), max_size=12)


def dialogue(manner: str = "chatml") -> tuple[ToyTokenizer, Dialogue]:
    tokenizer = ToyTokenizer(manner)
    return tokenizer, Dialogue(tokenizer, tokenizer.end_ids)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def sampled(talk: Dialogue, tokenizer: ToyTokenizer, question: str, answer: str, end: list[int]) -> Context:
    prompt = talk.begin(talk.render([user(question)]))
    ids = prompt.token_ids + [ord(letter) for letter in answer] + end
    return Context(ids, prompt.text, [user(question), reply(answer)])


@pytest.mark.parametrize("tokenizer", [ToyTokenizer(), ByteTokenizer()], ids=["chatml", "quickstart"])
@given(turns=st.lists(st.tuples(TEXT, TEXT, st.booleans()), min_size=1, max_size=5))
def test_a_dialogue_equals_its_full_rendering(tokenizer: ToyTokenizer, turns: list[tuple[str, str, bool]]) -> None:
    talk = Dialogue(tokenizer, tokenizer.end_ids)
    end = [tokenizer.end]
    messages: list[dict[str, Any]] = []
    context: Context | None = None
    for question, answer, ended in turns:
        messages.append(user(question))
        text = talk.render(messages)
        prompt = talk.begin(text) if context is None else talk.extend(context, messages, text)
        assert prompt is not None
        assert prompt.token_ids == tokenizer.encode(text)
        assert prompt.token_ids[len(prompt.token_ids) - len(prompt.delta) :] == prompt.delta
        messages.append(reply(answer))
        ids = prompt.token_ids + tokenizer.encode(answer) + (end if ended else [])
        context = Context(ids, text, list(messages))


def test_sampled_ids_are_kept_where_text_would_be_tokenised_otherwise() -> None:
    tokenizer, talk = dialogue()
    context = sampled(talk, tokenizer, "q", "ab", [END])
    odd = Context([*context.token_ids[:-3], 7777, END], context.text, context.messages)  # 7777: one token for "ab"
    messages = [*context.messages, user("next")]
    prompt = talk.extend(odd, messages, talk.render(messages))
    assert prompt is not None
    assert prompt.token_ids[: len(odd.token_ids)] == odd.token_ids
    assert tokenizer.decode(prompt.delta) == "\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("end", "begins"),
    [([END], "\n<|im_start|>"), ([], "<|im_end|>\n<|im_start|>"), ([OTHER_END], "<|im_end|>\n<|im_start|>")],
)
def test_the_delta_supplies_what_was_not_sampled(end: list[int], begins: str) -> None:
    tokenizer, talk = dialogue()
    context = sampled(talk, tokenizer, "q", "cut", end)
    messages = [*context.messages, user("next")]
    prompt = talk.extend(context, messages, talk.render(messages))
    assert prompt is not None
    assert tokenizer.decode(prompt.delta).startswith(begins)


@pytest.mark.parametrize(
    "messages",
    [
        [user("other"), reply("a"), user("next")],
        [user("q"), reply("edited"), user("next")],
        [user("q"), reply("a")],
        [user("q")],
        [{"role": "system", "content": "s"}, user("q"), reply("a"), user("next")],
    ],
)
def test_edited_history_is_no_extension(messages: list[dict[str, Any]]) -> None:
    tokenizer, talk = dialogue()
    context = sampled(talk, tokenizer, "q", "a", [END])
    assert talk.extend(context, messages, talk.render(messages)) is None


def test_a_template_that_trims_replies_still_extends() -> None:
    tokenizer, talk = dialogue("trim")
    context = sampled(talk, tokenizer, "q", "  spaced  ", [END])
    messages = [*context.messages, user("next")]
    prompt = talk.extend(context, messages, talk.render(messages))
    assert prompt is not None
    assert "  spaced  " in tokenizer.decode(prompt.token_ids)


def test_a_template_that_forgets_thoughts_begins_anew() -> None:
    tokenizer, talk = dialogue("forget")
    context = sampled(talk, tokenizer, "q", "<think>hm</think>a", [END])
    messages = [*context.messages, user("next")]
    assert talk.extend(context, messages, talk.render(messages)) is None


def test_an_extension_costs_one_rendering() -> None:
    tokenizer, talk = dialogue()
    context = sampled(talk, tokenizer, "q", "a", [END])
    messages = [*context.messages, user("next")]
    text = talk.render(messages)
    before = tokenizer.renders
    talk.extend(context, messages, text)
    assert tokenizer.renders == before


def test_quickstart_dialogue_has_the_quickstart_layout() -> None:
    from hpcrl.quickstart.dialogue import IM_END, encode, observation, opening

    talk = Dialogue(ByteTokenizer(), frozenset({IM_END}))
    messages = [user("Make it é.")]
    prompt = talk.begin(talk.render(messages))
    assert prompt.token_ids == opening("Make it é.")
    ids = [*prompt.token_ids, *encode("cat"), IM_END]
    messages += [reply("cat"), user("out\n")]
    context = Context(ids, prompt.text, messages[:2])
    extended = talk.extend(context, messages, talk.render(messages))
    assert extended is not None
    assert extended.delta == observation("out\n")
