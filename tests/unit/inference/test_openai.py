from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config.sections import RolloutSection
from hpcrl.inference.answers import ApiError
from hpcrl.inference.openai import parse_chat, parse_completion

ROLLOUT = RolloutSection(temperature=0.8, max_tokens=64)
USER = {"role": "user", "content": "x"}


def body(**more: Any) -> dict[str, Any]:
    return {"messages": [USER], **more}


def test_defaults_come_from_the_run() -> None:
    chat = parse_chat(body(), ROLLOUT)
    assert (chat.sampling.temperature, chat.sampling.top_p, chat.sampling.max_tokens) == (0.8, 1.0, 64)
    assert chat.messages == [USER]
    assert not chat.stop
    assert not chat.extra


def test_given_values_are_kept() -> None:
    chat = parse_chat(body(max_tokens=9, top_p=1, seed=3, stop="END", temperature=0.8, n=1, stream=False), ROLLOUT)
    assert (chat.sampling.max_tokens, chat.sampling.top_p, chat.stop, chat.extra) == (9, 1.0, ["END"], {"seed": 3})
    assert parse_chat(body(max_completion_tokens=9, max_tokens=8), ROLLOUT).sampling.max_tokens == 9
    assert parse_chat(body(max_tokens=1000), ROLLOUT).sampling.max_tokens == 64


@pytest.mark.parametrize(
    ("more", "code", "names"),
    [
        ({"temperature": 0.5}, "temperature_fixed", "rollout.temperature"),
        ({"temperature": "hot"}, "temperature_fixed", "temperature"),
        ({"top_k": 3}, "unknown_parameter", "top_k"),
        ({"tools": [{}]}, "invalid_value", "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "unsupported_value", "strict"),
        ({"tool_choice": "required"}, "unsupported_value", "tool_choice"),
        ({"parallel_tool_calls": False}, "unsupported_value", "parallel_tool_calls"),
        ({"logprobs": True}, "unsupported_value", "logprobs"),
        ({"frequency_penalty": 0.5}, "unsupported_value", "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "unsupported_value", "response_format"),
        ({"stream": "yes"}, "invalid_value", "stream"),
        ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ({"stream": True, "stream_options": {"chunks": 3}}, "unsupported_value", "stream_options"),
        ({"n": True}, "unsupported_value", "n is True"),
        ({"seed": 1 << 64}, "invalid_value", "seed"),
        ({"model": 3}, "invalid_value", "model"),
        ({"n": 2}, "unsupported_value", "n is 2"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_tokens": True}, "invalid_value", "max_tokens"),
        ({"top_p": 0}, "invalid_value", "top_p"),
        ({"top_p": 0.9}, "unsupported_value", "top_p"),
        ({"seed": "a"}, "invalid_value", "seed"),
        ({"stop": [""]}, "invalid_value", "stop"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "invalid_value", "messages[0]"),
        ({"messages": [USER, {"role": "user", "content": [{"type": "image_url"}]}]}, "invalid_value", "messages[1]"),
        ({"messages": [{**USER, "mood": "good"}]}, "unknown_parameter", "messages[0].mood"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(more: dict[str, Any], code: str, names: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(body(**more), ROLLOUT)
    assert (caught.value.status, caught.value.code) == (400, code)
    assert names in str(caught.value)


def test_numbers_of_any_size_are_refused_or_bounded() -> None:
    huge = 10**400
    for name in ("temperature", "top_p", "seed", "n"):
        with pytest.raises(ApiError, match=name):
            parse_chat(body(**{name: huge}), ROLLOUT)
    assert parse_chat(body(max_tokens=huge), ROLLOUT).sampling.max_tokens == ROLLOUT.max_tokens


def test_absent_parameters_may_be_null() -> None:
    assert parse_chat(body(tools=None, temperature=None, stop=None, seed=None), ROLLOUT).messages == [USER]


def test_known_parameters_may_have_the_value_that_changes_nothing() -> None:
    neutral = {"n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logprobs": False, "logit_bias": {}}
    assert parse_chat(body(**neutral, response_format={"type": "text"}, parallel_tool_calls=True), ROLLOUT).extra == {}


def test_tools_are_offered_unless_the_choice_is_none() -> None:
    tool = {"type": "function", "function": {"name": "bash", "description": None, "strict": False}}
    canonical = {"description": "", "parameters": {"type": "object"}, "name": "bash"}
    assert parse_chat(body(tools=[tool], tool_choice="auto"), ROLLOUT).tools == [
        {"type": "function", "function": canonical}
    ]
    assert parse_chat(body(tools=[tool], tool_choice="none"), ROLLOUT).tools is None
    assert parse_chat(body(tools=[]), ROLLOUT).tools is None


def test_tool_calls_in_history_are_compared_and_rendered_as_values() -> None:
    call = {"id": "c1", "type": "function", "index": 0, "function": {"name": "f", "arguments": '{"a":  1}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    given = [USER, {"role": "assistant", "content": None, "tool_calls": [call, broken]}]
    found = parse_chat({"messages": given}, ROLLOUT).messages[1]
    assert found["content"] == ""
    assert [one["function"]["arguments"] for one in found["tool_calls"]] == [{"a": 1}, '{"a": ']
    assert "index" not in found["tool_calls"][0]


@pytest.mark.parametrize(
    "call",
    [
        1,
        {},
        {"id": "c", "function": {"name": 3}},
        {"function": {"name": "f", "arguments": "{}"}},
        {"id": "c", "function": {"name": "f", "arguments": 3}},
        {"id": "c", "type": "custom", "function": {"name": "f", "arguments": "{}"}},
    ],
)
def test_tool_calls_that_are_none_are_refused(call: Any) -> None:
    with pytest.raises(ApiError, match=r"messages\[0\]\.tool_calls\[0\]"):
        parse_chat({"messages": [{"role": "assistant", "tool_calls": [call]}]}, ROLLOUT)


def test_text_completions() -> None:
    assert parse_completion({"prompt": ["once"], "max_tokens": 3}, ROLLOUT).prompt == "once"
    assert parse_completion({"prompt": [1, 2]}, ROLLOUT).prompt == [1, 2]
    for prompt in (None, "", [], ["a", "b"], [[1]], [-1], [True], 7):
        with pytest.raises(ApiError, match="prompt"):
            parse_completion({"prompt": prompt}, ROLLOUT)
    for name in ("messages", "tools", "max_completion_tokens"):
        with pytest.raises(ApiError, match=name):
            parse_completion({"prompt": "x", name: [1]}, ROLLOUT)


def test_messages_have_one_form() -> None:
    given = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "r", "refusal": None, "tool_calls": [], "audio": None},
        {"role": "assistant", "content": None},
        {"role": "developer", "content": "rules"},
    ]
    assert parse_chat({"messages": given}, ROLLOUT).messages == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "r"},
        {"role": "assistant", "content": ""},
        {"role": "system", "content": "rules"},
    ]
