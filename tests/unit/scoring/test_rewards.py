from __future__ import annotations

import pytest

from hpcrl.errors import InfraError
from hpcrl.scoring.rewards import parse_json, parse_text, total


@pytest.mark.parametrize(("content", "value"), [(b"1\n", 1.0), (b" 0.25 ", 0.25), (b"-1e-3", -0.001), (b"0", 0.0)])
def test_text(content: bytes, value: float) -> None:
    assert parse_text(content) == {"reward": value}


@pytest.mark.parametrize("content", [b"", b"one", b"1 2", b"nan", b"inf", b"\xff"])
def test_text_that_is_no_finite_number(content: bytes) -> None:
    with pytest.raises(InfraError) as caught:
        parse_text(content)
    assert caught.value.reason == "bad_reward"


def test_json() -> None:
    assert parse_json(b'{"a": 1, "b": 0.5}') == {"a": 1.0, "b": 0.5}


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b"1", b'{"a": "1"}', b'{"a": true}', b'{"a": NaN}', b'{"a": null}', b'{"a": 1e999}']
)
def test_json_that_is_no_table_of_finite_numbers(content: bytes) -> None:
    with pytest.raises(InfraError) as caught:
        parse_json(content)
    assert caught.value.reason == "bad_reward"


def test_total() -> None:
    assert total({"reward": 0.2, "style": 1.0}) == 0.2
    assert total({"a": 1.0, "b": 0.5}) == 0.75
