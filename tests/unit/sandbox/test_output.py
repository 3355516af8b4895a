from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcrl.sandbox.output import OutputBuffer


@given(st.lists(st.binary(max_size=40)), st.integers(1, 64))
def test_head_and_tail_whatever_the_pieces(pieces: list[bytes], limit: int) -> None:
    buffer = OutputBuffer(limit)
    for piece in pieces:
        buffer.add(piece)
    whole = b"".join(pieces)
    assert buffer.total == len(whole) and buffer.truncated == (len(whole) > limit)
    if not buffer.truncated:
        assert buffer.text() == whole.decode("utf-8", "replace")
    else:
        head, tail = whole[: (limit + 1) // 2], whole[len(whole) - limit // 2 :]
        marker = f"\n[... {len(whole) - limit} bytes omitted ...]\n"
        assert buffer.text() == head.decode("utf-8", "replace") + marker + tail.decode("utf-8", "replace")


def test_memory_is_bounded() -> None:
    buffer = OutputBuffer(1000)
    for _ in range(10_000):
        buffer.add(b"x" * 100)
    assert len(buffer._head) + len(buffer._tail) <= 1600
