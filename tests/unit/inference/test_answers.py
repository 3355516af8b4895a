from __future__ import annotations

import json
from typing import Any

from hpcrl.inference.answers import Answer, chat_completion, chat_events, error_body, text_completion, text_events
from hpcrl.protocol.record import CalledTool

PLAIN = Answer("q0", "policy", "hi", "stop", 5, 2, 10.7)
CALLED = [CalledTool(id="c1", name="f", arguments="{}"), CalledTool(id="c2", name="g", arguments="x")]
CALLING = Answer("q1", "policy", "", "tool_calls", 5, 2, 10.7, CALLED)


def events(stream: bytes) -> list[Any]:
    parts = stream.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def test_shapes() -> None:
    answer = chat_completion(PLAIN)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hi"}
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    assert (answer["object"], answer["created"]) == ("chat.completion", 10)
    assert text_completion(PLAIN)["choices"][0]["text"] == "hi"
    assert error_body("c", "m", 400)["error"]["type"] == "invalid_request_error"
    assert error_body("c", "m", 503)["error"]["type"] == "server_error"


def test_tool_calls_stand_in_the_message() -> None:
    message = chat_completion(CALLING)["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][1] == {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "x"}}


def test_a_stream_adds_up_to_the_message() -> None:
    deltas = [event["choices"][0]["delta"] for event in events(chat_events(PLAIN, False))]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "hi"}, {}]
    *_, last, usage = events(chat_events(CALLING, True))
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 7)
    calls = [
        d["tool_calls"][0]
        for e in events(chat_events(CALLING, False))
        if "tool_calls" in (d := e["choices"][0]["delta"])
    ]
    assert [(call["index"], call["id"]) for call in calls] == [(0, "c1"), (1, "c2")]
    assert events(text_events(PLAIN, False))[0]["choices"][0]["text"] == "hi"
