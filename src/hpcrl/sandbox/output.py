"""A command's output, bounded while it streams, by the rule of protocol/clip.py: first and last half of the budget are kept."""

from __future__ import annotations

from hpcrl.protocol.clip import marker

__all__ = ["OutputBuffer"]


class OutputBuffer:
    """Feed bytes with ``add``; ``text`` is what an agent sees. Holds at most 1.5 × ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self._head_limit = (limit + 1) // 2
        self._tail_limit = limit - self._head_limit
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data[-self._tail_limit :] if self._tail_limit else b""
            # Cut only now and then: cutting at every small write would copy the tail each time.
            if len(self._tail) > 2 * self._tail_limit:
                del self._tail[: -self._tail_limit]

    @property
    def truncated(self) -> bool:
        return self.total > self._head_limit + self._tail_limit

    def text(self) -> str:
        """Decoded output; a cut is marked by a line that says how many bytes are missing."""
        if not self.truncated:
            return bytes(self._head + self._tail).decode("utf-8", "replace")
        tail = self._tail[len(self._tail) - self._tail_limit :]
        omitted = self.total - len(self._head) - len(tail)
        return self._head.decode("utf-8", "replace") + marker(omitted) + tail.decode("utf-8", "replace")
