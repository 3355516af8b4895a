from __future__ import annotations

from typing import Any

import pytest

from hpcrl.config.schema import RolloutSection
from hpcrl.inference.openai import ApiError, completion, error_body, parse_chat

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
        ({"tools": [{}]}, "unknown_parameter", "tools"),
        ({"logprobs": True}, "unknown_parameter", "logprobs"),
        ({"stream": True}, "unsupported_value", "stream"),
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


def test_absent_parameters_may_be_null() -> None:
    assert parse_chat(body(tools=None, temperature=None, stop=None, seed=None), ROLLOUT).messages == [USER]


def test_messages_have_one_form() -> None:
    given = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "r", "refusal": None, "tool_calls": [], "audio": None},
        {"role": "assistant", "content": None},
    ]
    assert parse_chat({"messages": given}, ROLLOUT).messages == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "r"},
        {"role": "assistant", "content": ""},
    ]


def test_shapes() -> None:
    answer = completion("q0", "policy", "hi", "stop", 5, 2, 10.7)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hi"}
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    assert error_body("c", "m", 400)["error"]["type"] == "invalid_request_error"
    assert error_body("c", "m", 503)["error"]["type"] == "server_error"
