from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcrl.protocol.clip import MARGIN, clip, within
from hpcrl.sandbox.output import OutputBuffer


def test_head_and_tail_stay_with_a_marker() -> None:
    assert clip("aaaabbbbcccc", 5) == "aaa\n[... 7 bytes omitted ...]\ncc"
    assert clip("short", 5) == "short"
    assert clip("ééé", 3) == "é\n[... 3 bytes omitted ...]\n\ufffd"


@given(st.text(max_size=60), st.integers(1, 50))
def test_the_sandbox_cuts_by_the_same_rule(text: str, budget: int) -> None:
    buffer = OutputBuffer(budget)
    for byte in text.encode():
        buffer.add(bytes([byte]))
    assert buffer.text() == clip(text, budget)


@given(st.text(max_size=900), st.integers(1, 400), st.sampled_from(["", "\n[exit code 1]\n", "[stopped after 30 s]\n"]))
def test_what_was_cut_once_is_not_cut_again(text: str, budget: int, note: str) -> None:
    once = clip(text, budget) + note
    assert within(once, budget) == once
    assert len(within(text, budget).encode()) <= budget + MARGIN
