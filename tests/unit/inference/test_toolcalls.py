from __future__ import annotations

import json

import pytest

from hpcrl.errors import ConfigError
from hpcrl.inference.toolcalls import family_of, parse_reply
from hpcrl.protocol.record import MALFORMED_TOOL_CALL as MALFORMED


def calls(family: str, text: str) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in parse_reply(family, text, "q0").calls]


ONE = ("f", '{"a": 1}')


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'),
        (
            "hermes",
            '<think>\n<tool_call>{}</tool_call>?\n</think>\n<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>',
        ),
        ("llama3", '{"name": "f", "parameters": {"a": 1}}'),
        ("llama3", ' <|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}'),
        ("mistral", '[TOOL_CALLS]f{"a": 1}'),
    ],
)
def test_a_call(family: str, text: str) -> None:
    assert calls(family, text) == [ONE]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>'),
        ("llama3", '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}'),
    ],
)
def test_parallel_calls_keep_their_order(family: str, text: str) -> None:
    assert calls(family, text) == [ONE, ("g", "{}")]
    found = parse_reply(family, text, "q0").calls
    assert len({call.id for call in found}) == 2
    assert all(len(call.id) == 9 and call.id.isalnum() for call in found)


@pytest.mark.parametrize(
    ("family", "text", "written"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', '{"name": "f", "arguments": {"a": 1}'),
        ("hermes", '<tool_call>{"name": 3}', '{"name": 3}'),
        ("hermes", "<tool_call>NaN</tool_call>", "NaN"),
        ("llama3", '{"name": "f", "parameters":', '{"name": "f", "parameters":'),
        ("llama3", "<|python_tag|>import os", "import os"),
        ("mistral", "[TOOL_CALLS] f(1)", "f(1)"),
        ("mistral", "[TOOL_CALLS] [3]", "3"),
    ],
)
def test_a_malformed_call_is_handed_on(family: str, text: str, written: str) -> None:
    assert calls(family, text) == [(MALFORMED, written)]


@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral"])
@pytest.mark.parametrize("text", ["hello", "", '{"answer": 3}', "```\n{}\n```", "<think>x</think>y"])
def test_text_without_calls_stays_as_it_is(family: str, text: str) -> None:
    found = parse_reply(family, text, "q0")
    assert (found.content, found.calls) == (text, [])


def test_what_stands_around_calls_is_content() -> None:
    text = '<think>hm</think>\n\nI look.\n<tool_call>\n{"name": "f"}\n</tool_call>'
    assert parse_reply("hermes", text, "q0").content == "<think>hm</think>\n\nI look."


def test_a_sampled_id_of_mistrals_form_is_kept() -> None:
    text = "[TOOL_CALLS]" + json.dumps([{"name": "f", "arguments": {}, "id": "abcDEF123"}, {"name": "f", "id": "x"}])
    first, second = parse_reply("mistral", text, "q0").calls
    assert first.id == "abcDEF123" and second.id != "x"


def test_deep_nesting_is_malformed_not_fatal() -> None:
    deep = '{"name": ' + "[" * 100_000
    assert calls("hermes", f"<tool_call>{deep}</tool_call>")[0][0] == MALFORMED
    assert calls("llama3", deep)[0][0] == MALFORMED
    assert calls("mistral", f"[TOOL_CALLS]{'[' * 100_000}")[0][0] == MALFORMED


def test_the_family_follows_from_the_template_or_the_configuration() -> None:
    assert family_of("auto", "… <tool_call> …") == "hermes"
    assert family_of("auto", "… [TOOL_CALLS] …") == "mistral"
    assert family_of("auto", "<|start_header_id|>") == "llama3"
    assert family_of("auto", "<|im_start|>") == "hermes"
    assert family_of("mistral", "<tool_call>") == "mistral"
    with pytest.raises(ConfigError, match=r"model\.tool_calls"):
        family_of("other", "")


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param('{"a": "\\ud800"}', id="half a surrogate pair"),
        pytest.param('{"a": 1e999}', id="beyond a double"),
        pytest.param('{"a": ' + "[" * 300 + "]" * 300 + "}", id="deep"),
        pytest.param('{"a": ' + "9" * 5000 + "}", id="long number"),
    ],
)
@pytest.mark.parametrize("family", ["hermes", "llama3", "mistral"])
def test_what_could_not_be_written_again_is_malformed(family: str, arguments: str) -> None:
    text = {
        "hermes": f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>',
        "llama3": f'{{"name": "f", "parameters": {arguments}}}',
        "mistral": f'[TOOL_CALLS] [{{"name": "f", "arguments": {arguments}}}]',
    }[family]
    ((name, written),) = calls(family, text)
    assert name == MALFORMED and arguments in written


def test_many_spaces_are_read_in_no_time() -> None:
    """Each would take minutes, were the time the square of their number."""
    many = " " * 300_000
    assert calls("mistral", f"[TOOL_CALLS]f{many}x") == [(MALFORMED, f"f{many}x")]
    assert calls("mistral", f"[TOOL_CALLS]{many}f{many}" + '{"a": 1}') == [ONE]
    assert calls("mistral", '[TOOL_CALLS]f[CALL_ID]123[ARGS]{"a": 1}') == [ONE]
    assert calls("hermes", f"<tool_call>{many}x")[0][0] == MALFORMED
    assert calls("llama3", f'{{"name": {many}')[0][0] == MALFORMED
